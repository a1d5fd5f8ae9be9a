// Curves, drawn by hand. All charts of a page share one step under the pointer.

import { figure, h, svg } from "./dom.js";

const WIDTH = 460, HEIGHT = 180, LEFT = 44, RIGHT = 12, TOP = 10, BOTTOM = 22;

/** Charts whose pointers move together. */
export class Board {
  #charts = [];
  add(chart) {
    this.#charts.push(chart);
    return chart.element;
  }
  point(step) {
    for (const chart of this.#charts) chart.point(step);
  }
}

/** One chart. `series`: [{name, kind, points: [[step, value], ...]}, ...]; kind is a class of the style sheet. */
export class Chart {
  constructor(title, series, board, { smooth }) {
    this.board = board;
    this.series = series.filter((each) => each.points.length);
    const points = this.series.flatMap((each) => each.points);
    this.steps = [...new Set(points.map(([step]) => step))].sort((a, b) => a - b);
    this.x = scale(range(this.steps), [LEFT, WIDTH - RIGHT]);
    this.y = scale(roomy(range(points.map(([, value]) => value))), [HEIGHT - BOTTOM, TOP]);
    this.said = h("span", { class: "said" });
    this.marker = svg("g", { class: "marker" });
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
    this.drawing.append(...this.#axes(), ...this.series.flatMap((each) => this.#curve(each, smooth)), this.marker);
    this.drawing.addEventListener("pointermove", (event) => this.board.point(this.#stepAt(event)));
    this.drawing.addEventListener("pointerleave", () => this.board.point(null));
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, h("b", {}, title), this.said), this.drawing);
    this.point(null);
  }

  /** Show the values of a step, or the last ones. */
  point(step) {
    const values = this.series.map((each) => [each, step == null ? each.points.at(-1) : nearest(each.points, step)]);
    const key = ([{ kind, name }, [, value]]) =>
      h("span", { class: `key ${kind}` }, h("i", {}), this.series.length > 1 && name, h("b", {}, figure(value)));
    const dot = ([{ kind }, [at, value]]) => svg("circle", { class: kind, cx: this.x(at), cy: this.y(value), r: 3.5 });
    const x = step == null ? 0 : this.x(step);
    const line = step == null ? [] : [svg("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM })];
    this.said.replaceChildren(...values.map(key), step == null ? "" : h("span", {}, `step ${step}`));
    this.marker.replaceChildren(...line, ...values.map(dot));
  }

  #axes() {
    const rows = ticks(this.y.from).map((value) => [
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: this.y(value), y2: this.y(value) }),
      svg("text", { class: "tick", x: LEFT - 7, y: this.y(value) + 3.5, "text-anchor": "end" }, figure(value)),
    ]);
    const columns = ticks(this.x.from, 5).filter(Number.isInteger).map((step) =>
      svg("text", { class: "tick", x: this.x(step), y: HEIGHT - 5, "text-anchor": "middle" }, figure(step)));
    return [...rows.flat(), ...columns];
  }

  #curve({ kind, points }, smooth) {
    const draw = (values, name) => svg("path", { class: `${name} ${kind}`, d: path(values, this.x, this.y) });
    const rough = smooth && points.length > 12;
    const base = HEIGHT - BOTTOM;
    const shown = rough ? smoothed(points) : points;
    const area = `${path(shown, this.x, this.y)}L${this.x(shown.at(-1)[0])} ${base}L${this.x(shown[0][0])} ${base}Z`;
    const ground = this.series.length === 1 ? svg("path", { class: `area ${kind}`, d: area }) : "";
    return [ground, rough ? draw(points, "rough") : "", draw(shown, "line")];
  }

  #stepAt(event) {
    const box = this.drawing.getBoundingClientRect();
    const wanted = this.x.back(((event.clientX - box.left) / box.width) * WIDTH);
    return nearest(this.steps.map((step) => [step]), wanted)[0];
  }
}

/** A curve of numbers without axes. */
export function sparkline(values) {
  const points = smoothed(values.map((value, at) => [at, value]));
  const x = scale([0, Math.max(values.length - 1, 1)], [2, 158]);
  const y = scale(roomy(range(points.map(([, value]) => value))), [38, 3]);
  const last = points.at(-1);
  return svg(
    "svg", { class: "spark", viewBox: "0 0 160 41", "aria-hidden": "true" },
    values.length > 1 && svg("path", { class: "area reward", d: `${path(points, x, y)}L158 41L2 41Z` }),
    values.length > 1 && svg("path", { class: "line reward", d: path(points, x, y) }),
    last && svg("circle", { class: "reward", cx: x(last[0]), cy: y(last[1]), r: 2.5 }),
  );
}

function scale(from, to) {
  const factor = (to[1] - to[0]) / (from[1] - from[0] || 1);
  const convert = (value) => Math.round((to[0] + (value - from[0]) * factor) * 10) / 10;
  return Object.assign(convert, { from, back: (place) => from[0] + (place - to[0]) / factor });
}

function range(values) {
  // Not Math.min(...values): a long run has more values than a call has arguments.
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function roomy([low, high]) {
  if (low > high) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.5;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

function ticks([low, high], wanted = 4) {
  const rough = (high - low) / wanted || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * size).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

function path(points, x, y) {
  return points.map(([step, value], at) => `${at ? "L" : "M"}${x(step)} ${y(value)}`).join("");
}

/** Exponential mean, freed of its start at 0. */
function smoothed(points, keep = 0.75) {
  let sum = 0, weight = 0;
  return points.map(([step, value]) => {
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return [step, sum / weight];
  });
}

function nearest(points, step) {
  const off = (point) => Math.abs(point[0] - step);
  return points.reduce((best, point) => (off(point) < off(best) ? point : best), points[0]);
}
