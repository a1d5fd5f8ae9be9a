// Rollouts or groups of a run: filtered, sorted and paged by the gateway.

import { address, ago, date, figure, h, now, OUTCOMES, pill, seconds, stateOf, STATES } from "./dom.js";
import { data } from "./server.js";

const COLUMNS = [
  // title, what the gateway sorts by, class
  ["Rollout", "id", ""], ["Outcome", "outcome", ""], ["Reward", "reward", "number"], ["Attempts", "attempts", "number"],
  ["Time", "seconds", "number"], ["Queued", "created", "number"], ["Reason", null, "reason"],
];

export class List {
  constructor(run, query, signal) {
    Object.assign(this, { run, signal, asked: { show: "rollouts", sort: "created", order: "desc", ...query } });
    this.bar = h("div", { class: "bar" });
    this.body = h("div", { class: "scroll" });
    this.pages = h("div", { class: "pages" });
    this.element = h("section", { class: "list" }, this.bar, this.body, this.pages);
    this.rows = new Map();
    this.#drawBar();
  }

  /** Ask again for what is shown; rows of `changed` ids light up. */
  async refresh(changed = new Set()) {
    const asked = this.asked;
    const { show, ...query } = asked;
    const found = await data(["runs", this.run, show], this.signal, query);
    if (asked !== this.asked) return; // meanwhile something else was asked for
    const rows = found.rows.map((row) => (show === "groups" ? groupRow(row, changed) : rolloutRow(row, changed)));
    const head = show === "groups" ? ["Group", "Purpose", "Members", "Mean reward", "Created"].map((title) => h("th", {}, title)) : COLUMNS.map((each) => this.#heading(each));
    this.body.replaceChildren(rows.length ? h("table", { class: show }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)) : h("p", { class: "empty" }, "Nothing here fits."));
    this.pages.replaceChildren(
      this.#turn("First", {}, asked.after || asked.before), this.#turn("Previous", { before: found.before }, found.before),
      this.#turn("Next", { after: found.after }, found.after));
  }

  #drawBar() {
    const { show, outcome = "", purpose = "", text = "" } = this.asked;
    const tab = (name, title) => h("button", { class: show === name ? "tab chosen" : "tab", onclick: () => this.#ask({ show: name }) }, title);
    const choice = (name, value, values) =>
      h("select", { name, "aria-label": name, onchange: (event) => this.#ask({ [name]: event.target.value }) },
        h("option", { value: "" }, `any ${name}`), values.map((each) => h("option", { value: each, selected: each === value }, each.replaceAll("_", " "))));
    let typing;
    const search = h("input", {
      type: "search", name: "text", value: text, placeholder: "part of an id", "aria-label": "part of an id",
      oninput: (event) => (clearTimeout(typing), (typing = setTimeout(() => this.#ask({ text: event.target.value }, false), 200))),
    });
    this.bar.replaceChildren(
      h("div", { class: "tabs" }, tab("rollouts", "Rollouts"), tab("groups", "Groups")), h("span", { class: "space" }),
      show === "rollouts" ? choice("outcome", outcome, STATES) : "", choice("purpose", purpose, ["train", "evaluation"]), search);
  }

  #heading([title, sort, name]) {
    if (!sort) return h("th", { class: name }, title);
    const { sort: by, order } = this.asked;
    const turned = sort === by && order === "desc" ? "asc" : "desc";
    const arrow = sort !== by ? "" : order === "desc" ? " ↓" : " ↑";
    return h("th", { class: name, "aria-sort": sort !== by ? "none" : order === "desc" ? "descending" : "ascending" },
      h("button", { onclick: () => this.#ask({ sort, order: turned }) }, title + arrow));
  }

  #turn(title, place, possible) {
    return h("button", { disabled: !possible, onclick: () => this.#ask(place) }, title);
  }

  /** Change what is asked for: from its first page unless a place is named. The address says it, so it can be shared. */
  async #ask(change, redraw = true) {
    this.asked = { ...this.asked, after: "", before: "", ...change };
    history.pushState(null, "", address(["run", this.run], this.asked));
    if (redraw) this.#drawBar();
    await this.refresh();
  }
}

function rolloutRow(rollout, changed) {
  const end = rollout.finished ?? now();
  return h("tr", { class: changed.has(rollout.id) ? "changed" : "", "data-id": rollout.id },
    h("td", {}, h("a", { class: "id", href: address(["rollout", rollout.id]) }, rollout.id), rollout.purpose === "evaluation" && h("span", { class: "tag" }, "held out")),
    h("td", {}, pill(stateOf(rollout))),
    h("td", { class: "number" }, reward(rollout.reward)),
    h("td", { class: rollout.attempt > 1 ? "number odd" : "number" }, rollout.attempt),
    h("td", { class: "number" }, rollout.started ? seconds(end - rollout.started) : "–"),
    h("td", { class: "number", title: date(rollout.created) }, ago(rollout.created)),
    h("td", { class: "reason", title: rollout.reason }, rollout.reason));
}

function groupRow(group, changed) {
  const rewards = group.members.map((each) => each.reward).filter((each) => each != null);
  const done = group.members.filter((each) => each.state === "finished").length;
  return h("tr", { class: changed.has(group.id) ? "changed" : "", "data-id": group.id },
    h("td", {}, h("a", { class: "id", href: address(["group", group.id]) }, group.id)),
    h("td", {}, group.purpose === "evaluation" ? "held out" : "training"),
    h("td", {}, strip(group.members), h("span", { class: "dim" }, group.complete ? "" : ` ${done} of ${group.n}`)),
    h("td", { class: "number" }, rewards.length ? reward(rewards.reduce((a, b) => a + b) / rewards.length) : "–"),
    h("td", { class: "number", title: date(group.created) }, ago(group.created)));
}

/** One square for each member, by outcome; its height is the reward among the group's. */
export function strip(members) {
  const rewards = members.map((each) => each.reward).filter((each) => each != null);
  const low = Math.min(0, ...rewards), high = Math.max(1e-9, ...rewards);
  return h("span", { class: "strip" }, members.map((each) =>
    h("a", { href: address(["rollout", each.id]), title: `${each.id}: ${stateOf(each)}, reward ${figure(each.reward)}` },
      h("i", { class: OUTCOMES.includes(each.outcome) ? each.outcome : each.state, "--share": `${each.reward == null ? 100 : 12 + (88 * (each.reward - low)) / (high - low)}%` }))));
}

/** A number with a bar for what lies between 0 and 1. */
export function reward(value) {
  if (value == null) return h("span", { class: "dim" }, "–");
  const within = value >= 0 && value <= 1;
  return h("span", { class: "reward" }, figure(value), within && h("span", { class: "meter" }, h("i", { "--share": `${100 * value}%` })));
}
