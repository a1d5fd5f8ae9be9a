// What becomes of sampled tokens, as far as the records say it; the same order of questions as training asks them in.

const TRAINED_OUTCOMES = ["ok", "agent_exit", "agent_timeout", "budget"];
const GROUP_FATES = ["group_skipped", "group_incomplete", "update_skipped"];

export const MEANING = {
  trained: "used by an optimiser step",
  for_training: "nothing here keeps it from training; the trainer has not reported yet",
  undecided: "its rollout has not ended",
  undelivered: "the answer never reached the harness",
  superseded_attempt: "another attempt of the rollout followed",
  evaluation: "of a held-out task",
  side_call: "of a request that is beside the task",
  constrained: "sampled under a grammar: not the policy's own probability",
  no_logprob: "the engine gave no log-probability",
  overlong: "beyond the longest row that is trained",
  group_skipped: "all rewards of its group were equal",
  group_incomplete: "its group lost too many members, or the run ended",
  update_skipped: "the optimiser step was not finite",
  infrastructure: "its rollout ended by infrastructure, or without a reward",
  cancelled: "its rollout was cancelled",
  stale: "its policy version was too old",
};

/** The fate of a node's sampled tokens. Where a row was cut in the middle (`overlong`), that of its first ones. */
export function fateOf(rollout, attempt, node) {
  if (attempt.number !== rollout.attempt) return "superseded_attempt";
  if (rollout.state !== "finished") return node.delivered ? node.apart || "undecided" : "undecided";
  if (rollout.purpose === "evaluation") return "evaluation";
  if (rollout.outcome === "cancelled") return "cancelled";
  if (!TRAINED_OUTCOMES.includes(rollout.outcome) || rollout.reward == null) return "infrastructure";
  if (!node.delivered) return "undelivered";
  if (node.apart) return node.apart;
  if (!node.scored) return "no_logprob";
  const booked = rollout.fates;
  if (!booked) return "for_training";
  return GROUP_FATES.find((fate) => booked[fate]) ?? (booked.trained ? "trained" : "overlong");
}

/** Sampled tokens of a rollout by fate: [fate, tokens] pairs, as booked by its trainer or as the records say. */
export function fatesOf(rollout) {
  if (rollout.fates) return Object.entries(rollout.fates);
  const sums = {};
  for (const attempt of rollout.tries)
    for (const node of attempt.nodes) {
      const fate = fateOf(rollout, attempt, node);
      sums[fate] = (sums[fate] ?? 0) + node.sampled;
    }
  return Object.entries(sums);
}
