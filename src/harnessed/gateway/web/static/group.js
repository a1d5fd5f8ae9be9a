// One group: its task, and its rollouts side by side.

import { address, count, date, figure, h, mean, pill, seconds, stateOf } from "./dom.js";
import { reward, rewardsOf, strip } from "./list.js";
import { fieldsOf, textOf } from "./messages.js";
import { fact } from "./runs.js";
import { data, follow } from "./server.js";

const MOST_COMPARED = 4;
const EXCERPT = 600; // characters of a last answer

export async function showGroup({ page, frame, names, signal }) {
  const [id] = names;
  const chosen = new Set();
  const draw = async () => {
    const group = await data(["groups", id], signal);
    if (!page.querySelector(".members")) group.members.slice(0, 2).forEach((each) => chosen.add(each.id));
    frame([["runs", "#/"], [group.run, address(["run", group.run])], [id]]);
    page.replaceChildren(...content(group, chosen));
    performance.mark("shown");
    return group;
  };
  const { run } = await draw();
  const { cursor } = await data(["runs", run], signal);
  await draw(); // what has changed before the cursor
  await follow(run, cursor, async (changes) => {
    if (changes.some((each) => each.id === id || each.id.startsWith(`${id}.`))) await draw();
  }, signal);
}

function content(group, chosen) {
  const rewards = rewardsOf(group.members);
  const average = mean(rewards);
  const spread = average == null ? null : Math.sqrt(mean(rewards.map((each) => (each - average) ** 2)));
  const done = group.members.filter((each) => each.state === "finished").length;
  const compare = h("a", { class: "button" });
  const choose = (id, on) => {
    if (on) chosen.add(id);
    else chosen.delete(id);
    const ids = group.members.map((each) => each.id).filter((each) => chosen.has(each)).slice(0, MOST_COMPARED);
    compare.href = ids.length ? address(["rollout", ids[0]], { with: ids.slice(1).join(",") }) : location.hash;
    compare.textContent = `Compare ${ids.length} transcripts`;
  };
  choose();
  return [
    h("section", { class: "head" },
      h("div", { class: "title" }, h("h1", {}, group.id), strip(group.members), compare),
      h("dl", { class: "facts" },
        fact("mean reward", figure(average)), fact("deviation", figure(spread)),
        fact("members", `${done} of ${group.n}`), fact("purpose", group.purpose),
        fact("temperature", figure(group.sampling.temperature)), fact("created", date(group.created)))),
    h("section", { class: "task" }, h("h2", {}, "Task"), fieldsOf(group.task)),
    h("section", { class: "members" }, group.members.map((member) => card(member, chosen.has(member.id), choose))),
  ];
}

function card(member, on, choose) {
  const onchange = (event) => choose(member.id, event.target.checked);
  const took = member.finished && member.started ? seconds(member.finished - member.started) : "–";
  const part = ([name, value]) => h("span", {}, name, " ", h("b", {}, figure(value)));
  const parts = Object.entries(member.parts).map(part);
  const said = member.message ? textOf(member.message.content) || calls(member.message) : "";
  return h("article", { class: "card member" },
    h("header", {},
      h("input", { type: "checkbox", checked: on, "aria-label": `compare ${member.id}`, onchange }),
      h("a", { class: "id", href: address(["rollout", member.id]) }, `.${member.index}`), pill(stateOf(member)),
      h("span", { class: "space" }), reward(member.reward)),
    h("dl", {},
      fact("answers", count(member.answers)), fact("tokens", count(member.sampled)), fact("attempts", member.attempt),
      fact("time", took)),
    parts.length > 0 && h("p", { class: "parts" }, parts),
    member.reason && h("p", { class: "reason" }, member.reason),
    said && h("blockquote", {}, said.slice(0, EXCERPT)));
}

function calls(message) {
  return (message.tool_calls ?? []).map((call) => `${call.function?.name}(${call.function?.arguments})`).join("\n");
}
