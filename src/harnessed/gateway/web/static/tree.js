// An attempt as a tree: where its conversations go apart, drawn in lanes like the history of a repository.

import { count, h, svg } from "./dom.js";

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

  /** Node -> its lane. The longest way on stays in the lane of its node; another takes the first that is free as long. */
  lanes() {
    const depths = this.depths();
    const heir = (number) => this.children.get(number).reduce((best, each) => (best && depths.get(best) > depths.get(each) ? best : each), 0);
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
  const x = (number) => EDGE + LANE * lanes.get(number);
  const y = new Map(tree.nodes.map((node, at) => [node.number, ROW * (at + 0.5)]));
  const edges = tree.nodes.filter((node) => y.has(above(node))).map((node) =>
    svg("path", { class: `edge ${on.has(node.number) ? "on" : ""} ${node.split ? "split" : ""}`, d: edge(x(above(node)), y.get(above(node)), x(node.number), y.get(node.number)) }));
  const dots = tree.nodes.map((node) =>
    svg("circle", { class: `dot ${fates.get(node.number)} ${on.has(node.number) ? "on" : ""}`, cx: x(node.number), cy: y.get(node.number), r: on.has(node.number) ? 5 : 4 }));
  const height = ROW * tree.nodes.length;
  return h("div", { class: "map" },
    svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, edges, dots),
    h("ol", {}, tree.nodes.map((node) => h("li", {},
      h("button", { class: on.has(node.number) ? "on" : "", "data-node": node.number, onclick: () => choose(node.number) },
        h("b", {}, `#${node.number}`), h("span", {}, `${count(node.sampled)} tok`), notes(node, fates.get(node.number)))))));
}

function notes(node, fate) {
  const said = [!node.delivered && "undelivered", node.apart.replace("_", " "), node.split && `split: ${node.split}`, node.finish !== "stop" && node.finish];
  return h("em", { title: fate.replaceAll("_", " ") }, said.filter(Boolean).join(", "));
}

function edge(x1, y1, x2, y2) {
  if (x1 === x2) return `M${x1} ${y1}V${y2}`;
  const turn = Math.min(y1 + ROW, y2);
  return `M${x1} ${y1}C${x1} ${turn - 6} ${x2} ${y1 + 6} ${x2} ${turn}V${y2}`;
}
