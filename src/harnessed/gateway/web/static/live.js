// What goes on at this moment: the turnstile, the queue, who waits for whom, engines and controllers.

import { address, ago, count, date, empty, h, now, seconds, words } from "./dom.js";
import { fact } from "./runs.js";

const MOST_WAITING = 6; // shown, the longest waiting first

/** The panels for a run, from `GET /api/status`. */
export function live(status, run) {
  const queue = status.runs.find((each) => each.run === run);
  const turnstile = status.turnstiles.find((each) => each.run === run);
  const waiting = status.waiting.filter((each) => each.run === run);
  const engines = status.engines.filter((each) => each.run === run);
  const facts = ["queued", "running", "held", "in_flight"].map((name) => fact(words(name), count(queue?.[name] ?? 0)));
  return [
    panel("Turnstile and queue", drawTurnstile(turnstile), h("dl", { class: "facts" }, facts)),
    panel("Waiting", waiting.length ? drawWaiting(waiting) : empty("nobody waits")),
    panel("Engines and controllers", h("table", {}, engines.map(drawEngine), status.controllers.map(drawController))),
  ];
}

function panel(title, ...content) {
  return h("div", { class: "panel" }, h("h2", {}, title), content);
}

function drawTurnstile(turnstile) {
  const gate = h("span", { class: `gate ${turnstile?.state ?? "open"}` }, turnstile?.state ?? "open");
  if (!turnstile?.owner) return [gate, h("p", {}, "calls go through")];
  const { owner, mode, since, in_flight, lease_until } = turnstile;
  return [
    gate,
    h("p", {}, `by ${owner} (${mode}), since `, h("b", { title: date(since) }, seconds(now() - since))),
    h("p", {}, `${count(in_flight)} in flight; `, lease_until < now()
      ? h("b", {}, `its owner is gone: lease ended ${ago(lease_until)}`)
      : `its lease ends in ${seconds(lease_until - now())}`),
  ];
}

function drawWaiting(waiting) {
  const oldest = [...waiting].sort((a, b) => a.since - b.since);
  const younger = oldest.length - MOST_WAITING;
  return h("table", {},
    oldest.slice(0, MOST_WAITING).map((each) => h("tr", {},
      h("td", {}, h("a", { class: "id", href: address(["rollout", each.rollout]) }, within(each.rollout, each.run))),
      h("td", { title: each.for }, `for ${each.for}`),
      h("td", { class: "number", title: date(each.since) }, seconds(now() - each.since)))),
    younger > 0 && h("tr", {}, h("td", { colspan: 3 }, `and ${count(younger)} younger ones`)));
}

/** A rollout's id without that of its run, with which most begin. */
function within(rollout, run) {
  return rollout.startsWith(`${run}.`) ? rollout.slice(run.length + 1) : rollout;
}

function drawEngine(engine) {
  return h("tr", { title: engine.url },
    h("td", {}, h("i", { class: `light ${engine.healthy ? "ok" : "bad"}` }), `engine ${engine.id}`),
    h("td", {}, engine.healthy ? `${count(engine.in_flight ?? 0)} in flight` : engine.reason),
    h("td", { class: "number" }, engine.sampled_tokens == null ? "" : `${count(engine.sampled_tokens)} tok`));
}

function drawController(controller) {
  const late = controller.lease_until < now();
  return h("tr", {},
    h("td", {}, h("i", { class: `light ${late ? "bad" : "ok"}` }), `controller ${controller.owner}`),
    h("td", {}, `${count(controller.attempts)} attempts`),
    h("td", { class: "number" }, late ? `lease ended ${ago(controller.lease_until)}` : ""));
}
