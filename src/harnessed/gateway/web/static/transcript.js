// Transcripts: one, or several of a group side by side. Each is a map of its tree and the conversation chosen in it.

import { address, button, count, date, empty, figure, h, legend, now, pill } from "./dom.js";
import { seconds, shares, stateOf, words } from "./dom.js";
import { fateOf, fatesOf, MEANING } from "./fates.js";
import { drawMessage, drawTools, fieldsOf } from "./messages.js";
import { data, repeat } from "./server.js";
import { drawTokens, hide } from "./tokens.js";
import { above, drawMap, Tree } from "./tree.js";

const BOOKS_S = 600; // how long the fates of a finished rollout are waited for
const COLOURS = [["fate", "fate"], ["logprob", "log-probability"], ["version", "policy version"]];

export async function showTranscripts({ page, frame, names, query, signal }) {
  const ids = [names[0], ...(query.with ? query.with.split(",") : [])];
  const shared = { tokens: query.tokens === "1", colour: query.colour ?? "fate", several: ids.length > 1, signal };
  const columns = ids.map((id) => new Column(id, shared));
  signal.addEventListener("abort", hide);
  await Promise.all(columns.map((column) => column.refresh()));
  const { run, group, task, siblings } = columns[0].rollout;
  const title = ids.map((id, at) => (at ? shortly(id) : id)).join(" + ");
  frame([["runs", "#/"], [run, address(["run", run])], [group, address(["group", group])], [title]]);
  page.replaceChildren(
    h("section", { class: "top" },
      h("details", { class: "task" }, h("summary", {}, "Task"), fieldsOf(task)),
      drawSiblings(siblings, ids),
      drawOptions(columns, shared, { ...query, path: names[0] })),
    h("div", { class: shared.several ? "columns several" : "columns" }, columns.map((column) => column.element)));
  performance.mark("shown");
  await Promise.all(columns.map((column) => repeat(() => column.refresh(), 2000, signal)));
}

/** The group's rollouts; a click puts one beside the others, or takes it away. */
function drawSiblings(siblings, ids) {
  const links = siblings.map((each) => {
    const on = ids.includes(each.id);
    const others = on && ids.length > 1 ? ids.filter((id) => id !== each.id) : on ? ids : [...ids, each.id];
    const href = address(["rollout", others[0]], { with: others.slice(1).join(",") });
    return h("a", { class: on ? "sibling on" : "sibling", href, title: `${each.id}: ${words(stateOf(each))}` },
      h("i", { class: stateOf(each) }), shortly(each.id), h("b", {}, figure(each.reward)));
  });
  return h("div", { class: "siblings" }, h("span", { class: "dim" }, "side by side"), links);
}

/** Messages or tokens, and how these are coloured; the address says it. */
function drawOptions(columns, shared, { path, ...query }) {
  const choices = h("label", {}, "colour by ",
    h("select", { name: "colour", onchange: (event) => say({ colour: event.target.value }) },
      COLOURS.map(([value, title]) => h("option", { value, selected: value === shared.colour }, title))));
  const tabs = h("div", { class: "tabs" });
  const say = (change) => {
    Object.assign(shared, change);
    const shown = { tokens: shared.tokens ? 1 : "", colour: shared.tokens ? shared.colour : "" };
    history.replaceState(null, "", address(["rollout", path], { ...query, ...shown }));
    draw();
    columns.forEach((column) => column.draw());
  };
  const draw = () => {
    const { tokens } = shared;
    choices.hidden = !tokens;
    tabs.replaceChildren(
      button("Messages", () => say({ tokens: false }), tokens ? "tab" : "tab chosen"),
      button("Tokens", () => say({ tokens: true }), tokens ? "tab chosen" : "tab"));
  };
  draw();
  return h("div", { class: "options" }, choices, tabs);
}

/** One rollout: its attempts, the map of the chosen one, and the conversation up to the chosen answer. */
class Column {
  constructor(id, shared) {
    Object.assign(this, { id, shared, attempt: 0, leaf: 0, loaded: "", cache: new Map() });
    this.element = h("article", { class: "transcript" });
    const load = (entries) => entries.filter((each) => each.isIntersecting).forEach((each) => this.#load(each.target));
    this.visible = new IntersectionObserver(load, { rootMargin: "600px" });
    shared.signal.addEventListener("abort", () => this.visible.disconnect());
  }

  async refresh() {
    const last = this.rollout?.finished; // after it only the trainer's books are to come
    if (last && (this.rollout.fates || now() - last > BOOKS_S)) return;
    const rollout = await data(["rollouts", this.id], this.shared.signal);
    const loaded = JSON.stringify(rollout);
    if (loaded === this.loaded) return;
    Object.assign(this, { rollout, loaded });
    this.draw();
  }

  draw() {
    hide();
    this.visible.disconnect();
    const attempt = this.rollout.tries.find((each) => each.number === this.attempt) ?? this.rollout.tries.at(-1);
    this.element.replaceChildren(this.#head(attempt));
    if (!attempt?.nodes.length) {
      this.element.append(empty(attempt ? "Nothing was recorded, or it was pruned." : "No attempt yet."));
      return;
    }
    const tree = new Tree(attempt.nodes);
    const fates = new Map(attempt.nodes.map((node) => [node.number, fateOf(this.rollout, attempt, node)]));
    if (!tree.byNumber.has(this.leaf)) this.leaf = longest(tree);
    const choose = (number) => {
      if (!tree.path(this.leaf).some((node) => node.number === number)) this.leaf = tree.leaf(number);
      this.draw();
      const node = this.element.querySelector(`.node[data-number="${number}"]`);
      node?.scrollIntoView({ block: "start", behavior: "smooth" });
    };
    const ends = tree.leaves.length;
    const title = `${count(attempt.nodes.length)} answers, ${count(ends)} ${ends === 1 ? "branch" : "branches"}`;
    const nodes = tree.path(this.leaf).map((node) => this.#node(attempt, tree, node, fates.get(node.number), choose));
    this.element.append(h("div", { class: "tree" },
      h("aside", {}, h("h3", {}, title), drawMap(tree, fates, this.leaf, choose)),
      h("div", { class: "conversation" }, nodes)));
  }

  #head(attempt) {
    const { rollout } = this;
    const parts = fatesOf(rollout);
    const tab = (each) => {
      const onclick = () => (Object.assign(this, { attempt: each.number, leaf: 0 }), this.draw());
      const superseded = each.number !== rollout.attempt && h("em", {}, " superseded");
      const name = each === attempt ? "tab chosen" : "tab";
      return h("button", { class: name, title: date(each.started), onclick }, `attempt ${each.number}`, superseded);
    };
    const took = attempt?.ended ? `took ${seconds(attempt.ended - attempt.started)}` : "is still running";
    return h("header", {},
      h("div", { class: "title" },
        h("h1", { title: rollout.id }, this.shared.several ? shortly(rollout.id) : rollout.id), pill(stateOf(rollout)),
        h("span", { class: "space" }), h("span", { class: "grade", title: "reward" }, figure(rollout.reward))),
      rollout.reason && h("p", { class: "reason" }, rollout.reason),
      rollout.tries.length > 1 && h("div", { class: "tabs" }, rollout.tries.map(tab)),
      h("div", { class: "what" }, shares(parts), legend(parts), h("span", { class: "small dim" },
        `Tokens by fate, ${rollout.fates ? "as the trainer booked them" : "as far as the records say"}. `,
        attempt && `Attempt ${attempt.number} by ${attempt.owner} ${took}.`)));
  }

  #node(attempt, tree, node, fate, choose) {
    const root = !tree.byNumber.has(above(node));
    const beside = tree.children.get(root ? 0 : above(node)).filter((number) => number !== node.number);
    const split = `A new row (${node.split}): it continues the conversation of #${node.follows}, not with its tokens.`;
    const sizes = `${count(node.context)} prompt tokens added, ${count(node.sampled)} sampled`;
    return h("section", { class: "node", "data-number": node.number },
      h("header", {},
        h("b", {}, `#${node.number}`), h("span", { class: `fate ${fate}`, title: MEANING[fate] }, words(fate)),
        !node.delivered && fate !== "undelivered" && h("span", { class: "tag" }, "undelivered"),
        node.apart && fate !== node.apart && h("span", { class: "tag" }, words(node.apart)),
        node.broken_calls > 0 && h("span", { class: "tag odd" }, `${node.broken_calls} broken tool calls`),
        h("span", { class: "dim" }, `${sizes} at temperature ${figure(node.temperature)}, ended by ${node.finish}`),
        beside.length > 0 && h("span", { class: "beside" }, root ? "other conversations: " : "other branches: ",
          beside.map((number) => button(`#${number}`, () => choose(number), "quiet")))),
      node.split && h("p", { class: "note" }, split),
      this.shared.tokens ? this.#tokens(attempt, node, fate) : h("div", { class: "body" },
        node.tools.length > 0 && drawTools(node.tools), node.messages.map(drawMessage), drawMessage(node.message)));
  }

  /** Loaded when it comes into sight: a long attempt has more tokens than anybody reads. */
  #tokens(attempt, node, fate) {
    const body = h("div", { class: "body" }, empty("…"));
    Object.assign(body, { attempt, node, fate });
    this.visible.observe(body);
    return body;
  }

  async #load(body) {
    this.visible.unobserve(body);
    const { attempt, node, fate } = body;
    const key = `${attempt.number}/${node.number}`;
    const path = ["rollouts", this.id, attempt.number, node.number];
    if (!this.cache.has(key)) this.cache.set(key, data(path, this.shared.signal));
    try {
      body.replaceChildren(drawTokens(node, await this.cache.get(key), fate, this.shared.colour));
    } catch (error) {
      this.cache.delete(key);
      body.replaceChildren(empty(error.message));
    }
  }
}

/** The last answer of the longest conversation; of several, the latest. */
function longest(tree) {
  const length = (leaf) => tree.path(leaf).length;
  return tree.leaves.reduce((best, leaf) => (length(leaf) >= length(best) ? leaf : best));
}

/** A rollout's place in its group. */
function shortly(id) {
  return id.slice(id.lastIndexOf("."));
}
