// An attempt as a tree: where its conversations go apart, drawn in lanes like the history of a repository.

import { count, h, svg, words } from "./dom.js";

const ROW = 26, LANE = 14, EDGE = 12;

/** The node whose conversation a node goes on with; 0 for none. A bare prompt has only the tokens that it repeats. */
export function above(node) {
  return node.follows || node.parent;
}

export class Tree {
  constructor(nodes) {
    this.nodes = nodes;
    this.byNumber = new Map(nodes.map((node) => [node.number, node]));
    this.children = new Map(nodes.map((node) => [node.number, []]));
    this.children.set(0, []);
    for (const node of nodes) this.children.get(this.children.has(above(node)) ? above(node) : 0).push(node.number);
  }

  /** Nodes from a conversation's start to this one. */
  path(number) {
    const found = [];
    for (let node = this.byNumber.get(number); node; node = this.byNumber.get(above(node))) found.unshift(node);
    return found;
  }

  /** The last answer of the conversation that goes on from a node by its latest branches. */
  leaf(number) {
    for (let next; (next = this.children.get(number)?.at(-1)); ) number = next;
    return number;
  }

  get leaves() {
    return this.nodes.filter((node) => !this.children.get(node.number).length).map((node) => node.number);
  }

  /** Node -> the length of the longest conversation that goes on from it. */
  depths() {
    const depths = new Map();
    for (const { number } of [...this.nodes].reverse())
      depths.set(number, 1 + Math.max(0, ...this.children.get(number).map((child) => depths.get(child))));
    return depths;
  }

  /** Node -> its lane. The longest way on stays in the lane of its node; others take the first that is free so long. */
  lanes() {
    const depths = this.depths();
    const deeper = (best, each) => (best && depths.get(best) > depths.get(each) ? best : each);
    const heir = (number) => this.children.get(number).reduce(deeper, 0);
    const row = new Map(this.nodes.map((node, at) => [node.number, at]));
    const until = []; // lane -> the row up to which it is taken
    const lanes = new Map();
    for (const { number } of this.nodes) {
      if (lanes.has(number)) continue;
      const chain = [];
      for (let next = number; next; next = heir(next)) chain.push(next);
      const from = row.get(above(this.byNumber.get(number))) ?? row.get(number);
      let lane = until.findIndex((taken) => taken < from);
      if (lane < 0) lane = until.length;
      until[lane] = row.get(chain.at(-1));
      for (const each of chain) lanes.set(each, lane);
    }
    return lanes;
  }
}

/** The map of a tree: a row for each answer in the order of time. `fates`: node -> fate. */
export function drawMap(tree, fates, chosen, choose) {
  const lanes = tree.lanes();
  const width = EDGE * 2 + LANE * Math.max(0, ...lanes.values());
  const on = new Set(tree.path(chosen).map((node) => node.number));
  const lit = (number) => (on.has(number) ? "on" : "");
  const place = new Map();
  tree.nodes.forEach(({ number }, at) => place.set(number, [EDGE + LANE * lanes.get(number), ROW * (at + 0.5)]));
  const edges = tree.nodes.filter((node) => place.has(above(node))).map((node) => {
    const d = edge(...place.get(above(node)), ...place.get(node.number));
    return svg("path", { class: `edge ${lit(node.number)} ${node.split ? "split" : ""}`, d });
  });
  const dots = tree.nodes.map(({ number }) => {
    const [cx, cy] = place.get(number);
    return svg("circle", { class: `dot ${fates.get(number)}`, cx, cy, r: on.has(number) ? 5 : 4 });
  });
  const row = (node) =>
    h("button", { class: lit(node.number), "data-node": node.number, onclick: () => choose(node.number) },
      h("b", {}, `#${node.number}`), h("span", {}, `${count(node.sampled)} tok`), notes(node, fates.get(node.number)));
  const height = ROW * tree.nodes.length;
  return h("div", { class: "map" },
    svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, edges, dots),
    h("ol", {}, tree.nodes.map((node) => h("li", {}, row(node)))));
}

function notes(node, fate) {
  const split = node.split && `split: ${node.split}`;
  const said = [!node.delivered && "undelivered", words(node.apart), split, node.finish !== "stop" && node.finish];
  return h("em", { title: words(fate) }, said.filter(Boolean).join(", "));
}

function edge(x1, y1, x2, y2) {
  if (x1 === x2) return `M${x1} ${y1}V${y2}`;
  const turn = Math.min(y1 + ROW, y2);
  return `M${x1} ${y1}C${x1} ${turn - 6} ${x2} ${y1 + 6} ${x2} ${turn}V${y2}`;
}
