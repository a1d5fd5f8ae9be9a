// All runs, newest first.

import { address, ago, count, date, empty, figure, h, legend, shares, STATES, stateOf } from "./dom.js";
import { sparkline } from "./chart.js";
import { data, repeat } from "./server.js";

export async function showRuns({ page, signal }) {
  const list = h("div", { class: "cards" });
  page.replaceChildren(h("h1", {}, "Runs"), list);
  const refresh = async () => {
    const runs = await data(["runs"], signal);
    list.replaceChildren(...(runs.length ? runs.map(card) : [empty("No run yet: harnessed train makes one.")]));
    performance.mark("shown");
  };
  await refresh();
  await repeat(refresh, 3000, signal);
}

function card(run) {
  const states = byState(run.counts);
  const last = run.counts.reduce((latest, each) => Math.max(latest, each.last ?? 0), 0) || null;
  const parts = STATES.map((state) => [state, states[state] ?? 0]);
  const state = states.running || states.queued ? ["state going", "running"] : ["state", "ended"];
  return h(
    "a", { class: "card run", href: address(["run", run.id]) },
    h("div", { class: "name" }, h("h2", {}, run.id), h("span", { class: state[0] }, state[1])),
    h("div", { class: "what" }, shares(parts), legend(parts)),
    h("div", { class: "curve" }, sparkline(run.rewards)),
    h("dl", {},
      fact("mean reward", figure(meanReward(run.counts))),
      fact("last step", figure(run.rewards.at(-1))),
      fact("rollouts", count(run.counts.reduce((sum, each) => sum + each.n, 0))),
      fact("last activity", ago(last), date(last))),
  );
}

export function fact(name, value, title) {
  return h("div", { title }, h("dt", {}, name), h("dd", {}, value));
}

/** State or outcome -> rollouts. */
export function byState(counts) {
  const states = {};
  for (const each of counts) states[stateOf(each)] = (states[stateOf(each)] ?? 0) + each.n;
  return states;
}

/** Of everything that was judged in training. */
export function meanReward(counts) {
  const trained = counts.filter((each) => each.purpose === "train" && each.judged);
  const judged = trained.reduce((sum, each) => sum + each.judged, 0);
  return judged ? trained.reduce((sum, each) => sum + each.sum, 0) / judged : null;
}
