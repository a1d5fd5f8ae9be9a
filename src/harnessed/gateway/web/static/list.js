// Rollouts or groups of a run: filtered, sorted and paged by the gateway.

import { address, ago, button, date, empty, figure, h, mean, now, pill, seconds } from "./dom.js";
import { stateOf, STATES, words } from "./dom.js";
import { data } from "./server.js";

const COLUMNS = [
  // title, what the gateway sorts by, class
  ["Rollout", "id", ""], ["Outcome", "outcome", ""], ["Reward", "reward", "number"], ["Attempts", "attempts", "number"],
  ["Time", "seconds", "number"], ["Queued", "created", "number"], ["Reason", null, "reason"],
];
const GROUP_COLUMNS = [["Group"], ["Purpose"], ["Members"], ["Mean reward"], ["Created"]];
const TYPING_MS = 200;

export class List {
  constructor(run, query, signal) {
    Object.assign(this, { run, signal, asked: { show: "rollouts", sort: "created", order: "desc", ...query } });
    this.bar = h("div", { class: "bar" });
    this.body = h("div", { class: "scroll" });
    this.pages = h("div", { class: "pages" });
    this.element = h("section", { class: "list" }, this.bar, this.body, this.pages);
    this.#drawBar();
  }

  /** Ask again for what is shown; rows of `changed` ids light up. */
  async refresh(changed = new Set()) {
    const asked = this.asked;
    const { show, ...query } = asked;
    const { rows, before, after } = await data(["runs", this.run, show], this.signal, query);
    if (asked !== this.asked) return; // meanwhile something else was asked for
    const head = (show === "groups" ? GROUP_COLUMNS : COLUMNS).map((each) => this.#heading(...each));
    const drawn = rows.map((row) => {
      const cells = show === "groups" ? groupCells(row) : rolloutCells(row);
      return h("tr", { class: changed.has(row.id) ? "changed" : "", "data-id": row.id }, cells);
    });
    const table = h("table", { class: show }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, drawn));
    this.body.replaceChildren(rows.length ? table : empty("Nothing here fits."));
    const turn = (title, possible, place) =>
      h("button", { disabled: !possible, onclick: () => this.#ask(place) }, title);
    this.pages.replaceChildren(
      turn("First", asked.after || asked.before, {}),
      turn("Previous", before, { before }),
      turn("Next", after, { after }));
  }

  #drawBar() {
    const { show, outcome, purpose, text } = this.asked;
    const tab = (name, title) => button(title, () => this.#ask({ show: name }), show === name ? "tab chosen" : "tab");
    const choice = (name, value, values) => {
      const options = values.map((each) => h("option", { value: each, selected: each === value }, words(each)));
      const onchange = (event) => this.#ask({ [name]: event.target.value });
      return h("select", { name, "aria-label": name, onchange }, h("option", { value: "" }, `any ${name}`), options);
    };
    let typing;
    const oninput = (event) => {
      clearTimeout(typing);
      typing = setTimeout(() => this.#ask({ text: event.target.value }, { typed: true }), TYPING_MS);
    };
    const hint = "part of an id";
    const search = { type: "search", name: "text", value: text, placeholder: hint, "aria-label": hint };
    this.bar.replaceChildren(
      h("div", { class: "tabs" }, tab("rollouts", "Rollouts"), tab("groups", "Groups")),
      h("span", { class: "space" }),
      show === "rollouts" ? choice("outcome", outcome, STATES) : "",
      choice("purpose", purpose, ["train", "evaluation"]),
      h("input", { ...search, oninput }));
  }

  #heading(title, sort, name) {
    if (!sort) return h("th", { class: name }, title);
    const chosen = sort === this.asked.sort;
    const down = this.asked.order === "desc";
    const order = chosen && down ? "asc" : "desc";
    return h("th", { class: name, "aria-sort": !chosen ? "none" : down ? "descending" : "ascending" },
      button(title + (!chosen ? "" : down ? " ↓" : " ↑"), () => this.#ask({ sort, order })));
  }

  /** Change what is asked for: from its first page unless a place is named. The address says it and can be shared. */
  async #ask(change, { typed = false } = {}) {
    this.asked = { ...this.asked, after: "", before: "", ...change };
    const here = address(["run", this.run], this.asked);
    if (typed) history.replaceState(null, "", here);
    else history.pushState(null, "", here);
    if (!typed) this.#drawBar(); // whoever types keeps the field
    await this.refresh();
  }
}

function rolloutCells(rollout) {
  const end = rollout.finished ?? now();
  return [
    h("td", {}, h("a", { class: "id", href: address(["rollout", rollout.id]) }, rollout.id),
      rollout.purpose === "evaluation" && h("span", { class: "tag" }, "held out")),
    h("td", {}, pill(stateOf(rollout))),
    h("td", { class: "number" }, reward(rollout.reward)),
    h("td", { class: rollout.attempt > 1 ? "number odd" : "number" }, rollout.attempt),
    h("td", { class: "number" }, rollout.started ? seconds(end - rollout.started) : "–"),
    h("td", { class: "number", title: date(rollout.created) }, ago(rollout.created)),
    h("td", { class: "reason", title: rollout.reason }, rollout.reason),
  ];
}

function groupCells(group) {
  const done = group.members.filter((each) => each.state === "finished").length;
  return [
    h("td", {}, h("a", { class: "id", href: address(["group", group.id]) }, group.id)),
    h("td", {}, group.purpose === "evaluation" ? "held out" : "training"),
    h("td", {}, strip(group.members), !group.complete && h("span", { class: "dim" }, ` ${done} of ${group.n}`)),
    h("td", {}, reward(mean(rewardsOf(group.members)))),
    h("td", { title: date(group.created) }, ago(group.created)),
  ];
}

export function rewardsOf(members) {
  return members.map((each) => each.reward).filter((each) => each != null);
}

/** A bar for each member, coloured by outcome, as high as its reward among the group's. */
export function strip(members) {
  const rewards = rewardsOf(members);
  const low = Math.min(0, ...rewards), high = Math.max(1e-9, ...rewards);
  return h("span", { class: "strip" }, members.map((each) => {
    const height = each.reward == null ? 100 : 12 + (88 * (each.reward - low)) / (high - low);
    const title = `${each.id}: ${words(stateOf(each))}, reward ${figure(each.reward)}`;
    const bar = h("i", { class: stateOf(each), "--share": `${height}%` });
    return h("a", { href: address(["rollout", each.id]), title }, bar);
  }));
}

/** A number, with a bar if it lies between 0 and 1. */
export function reward(value) {
  const bar = value >= 0 && value <= 1 && value != null;
  const meter = bar && h("span", { class: "meter" }, h("i", { "--share": `${100 * value}%` }));
  return h("span", { class: "reward" }, figure(value), meter);
}
