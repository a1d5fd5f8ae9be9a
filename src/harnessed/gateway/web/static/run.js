// One run: its curves, what goes on now, its rollouts and groups.

import { Board, Chart } from "./chart.js";
import { ago, count, date, empty, h, legend, shares, STATES } from "./dom.js";
import { List } from "./list.js";
import { live } from "./live.js";
import { byState, fact } from "./runs.js";
import { data, follow, get, repeat } from "./server.js";

const CHARTS = [
  ["Reward", { reward_mean: "reward" }],
  ["Held-out success", { held_out: "held", held_out_greedy: "greedy" }],
  ["Entropy", { entropy: "entropy" }],
];
const NAMES = { reward_mean: "mean", held_out: "sampled", held_out_greedy: "greedy" };

export async function showRun({ page, frame, names, query, signal }) {
  const [id] = names;
  frame([["runs", "#/"], [id]]);
  const head = h("section", { class: "head" });
  const curves = h("section", { class: "charts" });
  const now = h("section", { class: "live" });
  const list = new List(id, query, signal);
  page.replaceChildren(head, curves, now, list.element);
  const metrics = new Metrics(id, curves, signal);
  const lively = async () => now.replaceChildren(...live(await get("/api/status", signal), id));

  const run = await data(["runs", id], signal);
  drawHead(head, run);
  await Promise.all([metrics.refresh(), list.refresh()]);
  performance.mark("shown");
  await Promise.all([
    repeat(lively, 2000, signal),
    repeat(() => metrics.refresh(), 3000, signal),
    follow(id, run.cursor, async (changes) => {
      const changed = new Set(changes.map((each) => each.id));
      const [again] = await Promise.all([data(["runs", id], signal), list.refresh(changed)]);
      drawHead(head, again);
    }, signal),
  ]);
}

function drawHead(head, run) {
  const states = byState(run.counts);
  const parts = STATES.map((state) => [state, states[state] ?? 0]);
  const of = (purpose) => run.counts.filter((each) => each.purpose === purpose).reduce((sum, each) => sum + each.n, 0);
  const last = run.counts.reduce((latest, each) => Math.max(latest, each.last ?? 0), 0) || null;
  head.replaceChildren(
    h("div", { class: "title" }, h("h1", {}, run.id), h("code", { class: "folder", title: "policy" }, run.policy)),
    h("dl", { class: "facts" },
      fact("training", count(of("train"))), fact("held out", count(of("evaluation"))),
      fact("queued", count(states.queued ?? 0)), fact("running", count(states.running ?? 0)),
      fact("last activity", ago(last), date(last)), fact("begun", ago(run.created), date(run.created))),
    h("div", { class: "what" }, shares(parts), legend(parts)),
  );
}

/** The curves, which grow while the trainer posts its steps. */
class Metrics {
  constructor(run, element, signal) {
    Object.assign(this, { run, element, signal, lines: [], last: 0, all: false, smooth: true, drawn: -1 });
  }

  async refresh() {
    const more = await get(`/api/runs/${encodeURIComponent(this.run)}/metrics?after=${this.last}`, this.signal);
    this.lines.push(...more);
    this.last = this.lines.at(-1)?.number ?? 0;
    if (this.drawn !== this.last) this.draw();
  }

  draw() {
    this.drawn = this.last;
    const board = new Board();
    const known = new Set(CHARTS.flatMap(([, fields]) => Object.keys(fields)));
    const charts = [...CHARTS, ...(this.all ? this.#others(known) : [])];
    const option = (name, field) => {
      const onchange = (event) => ((this[field] = event.target.checked), this.draw());
      return h("label", {}, h("input", { type: "checkbox", checked: this[field], onchange }), name);
    };
    const chart = ([title, fields]) => {
      const curve = ([field, kind]) => ({ name: NAMES[field], kind, points: this.#points(field) });
      const series = Object.entries(fields).map(curve);
      return series.some((each) => each.points.length)
        ? board.add(new Chart(title, series, board, { smooth: this.smooth }))
        : h("figure", { class: "chart none" }, h("figcaption", {}, h("b", {}, title)), empty("nothing posted yet"));
    };
    this.element.replaceChildren(
      h("div", { class: "options" }, h("h2", {}, "Curves"), option("smooth", "smooth"), option("all metrics", "all")),
      h("div", { class: "figures" }, charts.map(chart)),
    );
  }

  #points(field) {
    const said = this.lines.filter(({ values }) => typeof values[field] === "number");
    return said.map(({ step, values }) => [step, values[field]]);
  }

  #others(known) {
    const fields = new Set(this.lines.flatMap(({ values }) => Object.keys(values)));
    const others = [...fields].filter((field) => field !== "step" && !known.has(field) && this.#points(field).length);
    return others.map((field) => [field, { [field]: "other" }]);
  }
}
