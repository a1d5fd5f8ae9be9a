// One group: its task, and its rollouts side by side.

import { address, count, date, figure, h, pill, seconds, stateOf } from "./dom.js";
import { reward, strip } from "./list.js";
import { fact } from "./runs.js";
import { data, follow } from "./server.js";
import { fieldsOf, textOf } from "./messages.js";

const MOST_COMPARED = 4;

export async function showGroup({ page, frame, names, signal }) {
  const [id] = names;
  const draw = async () => {
    const group = await data(["groups", id], signal);
    frame([["runs", "#/"], [group.run, address(["run", group.run])], [id]]);
    page.replaceChildren(...content(group));
    performance.mark("shown");
    return group;
  };
  const cursor = (run) => data(["runs", run], signal).then((found) => found.cursor);
  const group = await draw();
  await follow(group.run, await cursor(group.run), async (changes) => {
    if (changes.some((each) => each.id === id || group.members.some((member) => member.id === each.id))) await draw();
  }, signal);
}

function content(group) {
  const rewards = group.members.map((each) => each.reward).filter((each) => each != null);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
  const spread = mean == null ? null : Math.sqrt(rewards.reduce((sum, each) => sum + (each - mean) ** 2, 0) / rewards.length);
  const chosen = new Set(group.members.slice(0, 2).map((each) => each.id));
  const compare = h("a", { class: "button" });
  const choose = (id, on) => {
    if (on) chosen.add(id);
    else chosen.delete(id);
    const [first, ...others] = group.members.map((each) => each.id).filter((each) => chosen.has(each)).slice(0, MOST_COMPARED);
    compare.href = first ? address(["rollout", first], { with: others.join(",") }) : "#";
    compare.textContent = `Compare ${Math.min(chosen.size, MOST_COMPARED)} transcripts`;
  };
  choose();
  return [
    h("section", { class: "head" },
      h("div", { class: "title" }, h("h1", {}, group.id), strip(group.members), compare),
      h("dl", { class: "facts" },
        fact("mean reward", figure(mean)), fact("deviation", figure(spread)), fact("members", `${group.members.filter((each) => each.state === "finished").length} of ${group.n}`),
        fact("purpose", group.purpose), fact("temperature", figure(group.sampling.temperature)), fact("created", date(group.created)))),
    h("section", { class: "task" }, h("h2", {}, "Task"), fieldsOf(group.task)),
    h("section", { class: "members" }, group.members.map((member) => card(member, chosen.has(member.id), choose))),
  ];
}

function card(member, on, choose) {
  const said = member.message ? textOf(member.message.content) || calls(member.message) : "";
  return h("article", { class: "card member" },
    h("header", {},
      h("input", { type: "checkbox", checked: on, "aria-label": `compare ${member.id}`, onchange: (event) => choose(member.id, event.target.checked) }),
      h("a", { class: "id", href: address(["rollout", member.id]) }, `.${member.index}`), pill(stateOf(member)), h("span", { class: "space" }), reward(member.reward)),
    h("dl", {},
      fact("answers", count(member.answers)), fact("tokens", count(member.sampled)), fact("attempts", member.attempt),
      fact("time", member.finished && member.started ? seconds(member.finished - member.started) : "–")),
    Object.keys(member.parts).length > 0 && h("p", { class: "parts" }, Object.entries(member.parts).map(([name, value]) => h("span", {}, name, " ", h("b", {}, figure(value))))),
    member.reason && h("p", { class: "reason" }, member.reason),
    said && h("blockquote", {}, said.slice(0, 600)));
}

function calls(message) {
  return (message.tool_calls ?? []).map((call) => `${call.function?.name}(${call.function?.arguments})`).join("\n");
}

