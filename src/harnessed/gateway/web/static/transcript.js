// Transcripts: one, or several of a group side by side. Each is a map of its tree and the conversation chosen in it.

import { address, count, date, figure, h, legend, now, pill, seconds, shares, stateOf } from "./dom.js";
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
  const columns = ids.map((id) => new Column(id, shared, id === ids[0] ? Number(query.attempt) : 0));
  signal.addEventListener("abort", hide);
  await Promise.all(columns.map((column) => column.refresh()));
  const [first] = columns;
  frame([["runs", "#/"], [first.rollout.run, address(["run", first.rollout.run])], [first.rollout.group, address(["group", first.rollout.group])], [ids.map((id, at) => (at ? shortly(id) : id)).join(" + ")]]);
  page.replaceChildren(
    h("section", { class: "top" }, h("details", { class: "task" }, h("summary", {}, "Task"), fieldsOf(first.rollout.task)), siblings(first.rollout, ids), options(columns, shared, ids)),
    h("div", { class: ids.length > 1 ? "columns several" : "columns" }, columns.map((column) => column.element)));
  performance.mark("shown");
  await Promise.all(columns.map((column) => repeat(() => column.refresh(), 2000, signal)));
}

/** The group's rollouts; a click puts one beside the others, or takes it away. */
function siblings(rollout, ids) {
  return h("div", { class: "siblings" }, h("span", { class: "dim" }, "side by side"), rollout.siblings.map((each) => {
    const others = ids.includes(each.id) ? ids.filter((id) => id !== each.id) : [...ids, each.id];
    const [first, ...rest] = others.length ? others : [each.id];
    return h("a", { class: ids.includes(each.id) ? "sibling on" : "sibling", href: address(["rollout", first], { with: rest.join(",") }), title: `${each.id}: ${stateOf(each)}` },
      h("i", { class: stateOf(each) }), each.id.split(".").at(-1), h("b", {}, figure(each.reward)));
  }));
}

function options(columns, shared, ids) {
  const say = () => {
    const kept = new URLSearchParams(location.hash.split("?")[1] ?? "");
    history.replaceState(null, "", address(["rollout", ids[0]], { ...Object.fromEntries(kept), tokens: shared.tokens ? "1" : "", colour: shared.colour === "fate" ? "" : shared.colour }));
    columns.forEach((column) => column.draw());
    choices.hidden = !shared.tokens;
    modes.forEach((mode, at) => mode.classList.toggle("chosen", Boolean(at) === shared.tokens));
  };
  const mode = (title, tokens) => h("button", { class: shared.tokens === tokens ? "tab chosen" : "tab", onclick: () => ((shared.tokens = tokens), say()) }, title);
  const modes = [mode("Messages", false), mode("Tokens", true)];
  const choices = h("label", { hidden: !shared.tokens }, "colour by ", h("select", { name: "colour", onchange: (event) => ((shared.colour = event.target.value), say()) },
    COLOURS.map(([value, title]) => h("option", { value, selected: value === shared.colour }, title))));
  return h("div", { class: "options" }, choices, h("div", { class: "tabs" }, modes));
}

/** One rollout: its attempts, the map of the chosen one, and the conversation up to the chosen answer. */
class Column {
  constructor(id, shared, attempt) {
    Object.assign(this, { id, shared, attempt, leaf: 0, loaded: "", cache: new Map() });
    this.element = h("article", { class: "transcript" });
    this.visible = new IntersectionObserver((entries) => entries.filter((each) => each.isIntersecting).forEach((each) => this.#load(each.target)), { rootMargin: "600px" });
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
    const { rollout } = this;
    const attempt = rollout.tries.find((each) => each.number === this.attempt) ?? rollout.tries.at(-1);
    this.visible.disconnect();
    this.element.replaceChildren(...this.#head(attempt));
    if (!attempt?.nodes.length) {
      this.element.append(h("p", { class: "empty" }, attempt ? "Nothing was recorded, or it was pruned." : "No attempt yet."));
      return;
    }
    const tree = new Tree(attempt.nodes);
    const fates = new Map(attempt.nodes.map((node) => [node.number, fateOf(rollout, attempt, node)]));
    if (!tree.byNumber.has(this.leaf)) this.leaf = mainLeaf(tree);
    const choose = (number) => {
      this.leaf = tree.path(this.leaf).some((node) => node.number === number) ? this.leaf : tree.leaf(number);
      this.draw();
      this.element.querySelector(`.node[data-number="${number}"]`)?.scrollIntoView({ block: "start", behavior: "smooth" });
    };
    const path = tree.path(this.leaf);
    this.element.append(h("div", { class: "tree" }, 
      h("aside", {}, h("h3", {}, `${count(attempt.nodes.length)} answers, ${count(tree.leaves.length)} ${tree.leaves.length === 1 ? "branch" : "branches"}`), drawMap(tree, fates, this.leaf, choose)),
      h("div", { class: "conversation" }, path.map((node) => this.#node(attempt, tree, node, fates.get(node.number), choose)))));
  }

  #head(attempt) {
    const { rollout } = this;
    const parts = fatesOf(rollout);
    const { several } = this.shared;
    const choose = (number) => ((this.attempt = number), (this.leaf = 0), this.draw());
    return [h("header", {},
      h("div", { class: "title" }, h("h1", { title: rollout.id }, several ? shortly(rollout.id) : rollout.id), pill(stateOf(rollout)), h("span", { class: "space" }), h("span", { class: "grade", title: "reward" }, figure(rollout.reward))),
      rollout.reason && h("p", { class: "reason" }, rollout.reason),
      rollout.tries.length > 1 && h("div", { class: "tabs" }, rollout.tries.map((each) =>
        h("button", { class: each === attempt ? "tab chosen" : "tab", title: `by ${each.owner}, ${date(each.started)}`, onclick: () => choose(each.number) },
          `attempt ${each.number}`, each.number !== rollout.attempt && h("em", {}, " superseded")))),
      h("div", { class: "what" }, shares(parts), legend(parts), h("span", { class: "small dim" }, [
        `Tokens by fate, ${rollout.fates ? "as the trainer booked them" : "as far as the records say"}.`,
        attempt && ` Attempt ${attempt.number} by ${attempt.owner}, ${attempt.ended ? `took ${seconds(attempt.ended - attempt.started)}` : "still running"}.`])))];
  }

  #node(attempt, tree, node, fate, choose) {
    const beside = tree.children.get(tree.byNumber.has(above(node)) ? above(node) : 0).filter((number) => number !== node.number);
    const { tokens } = this.shared;
    const body = tokens ? h("div", { class: "body", "data-attempt": attempt.number, "data-number": node.number }, h("p", { class: "empty" }, "…")) : h("div", { class: "body" },
      node.tools.length > 0 && drawTools(node.tools), node.messages.map(drawMessage), drawMessage(node.message));
    if (tokens) {
      Object.assign(body, { node, fate });
      this.visible.observe(body);
    }
    return h("section", { class: "node", "data-number": node.number },
      h("header", {},
        h("b", {}, `#${node.number}`), h("span", { class: `fate ${fate}`, title: MEANING[fate] }, fate.replaceAll("_", " ")),
        !node.delivered && fate !== "undelivered" && h("span", { class: "tag" }, "undelivered"), node.apart && fate !== node.apart && h("span", { class: "tag" }, node.apart.replace("_", " ")),
        h("span", { class: "dim" }, `${count(node.context)} prompt tokens added, ${count(node.sampled)} sampled at temperature ${figure(node.temperature)}, ended by ${node.finish}`),
        node.broken_calls > 0 && h("span", { class: "tag odd" }, `${node.broken_calls} broken tool calls`),
        beside.length > 0 && h("span", { class: "beside" }, tree.byNumber.has(above(node)) ? "other branches: " : "other conversations: ", beside.map((number) => h("button", { class: "quiet", onclick: () => choose(number) }, `#${number}`)))),
      node.split && h("p", { class: "note" }, `The context of this answer is a new row (${node.split}): it goes on with the conversation of #${node.follows}, but not with its tokens.`),
      body);
  }

  async #load(body) {
    this.visible.unobserve(body);
    const { attempt, number } = body.dataset;
    const key = `${attempt}/${number}`;
    if (!this.cache.has(key)) this.cache.set(key, data(["rollouts", this.id, attempt, number], this.shared.signal));
    try {
      body.replaceChildren(drawTokens(body.node, await this.cache.get(key), body.fate, this.shared.colour));
    } catch (error) {
      body.replaceChildren(h("p", { class: "empty" }, error.message));
    }
  }
}

/** A rollout's place in its group. */
function shortly(id) {
  return id.slice(id.lastIndexOf("."));
}

/** The answer of the longest conversation, the latest of them. */
function mainLeaf(tree) {
  return tree.leaves.reduce((best, leaf) => (tree.path(leaf).length >= tree.path(best).length ? leaf : best));
}
