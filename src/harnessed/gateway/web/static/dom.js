// Elements, numbers and times for all pages. Text is only ever set as text: what agents and models wrote is hostile.

/** An element. Properties that begin with `on` are listeners, others attributes; null children are left out. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for drawings. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

/** A hash address of this application. */
export function address(path, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  const tail = new URLSearchParams(kept).toString();
  return "#/" + path.map(encodeURIComponent).join("/") + (tail ? "?" + tail : "");
}

let ahead = 0; // seconds that the gateway's clock is ahead of this one

export function keepTime(now) {
  ahead = now - Date.now() / 1000;
}

export function now() {
  return Date.now() / 1000 + ahead;
}

export function seconds(value) {
  if (value == null) return "–";
  if (value < 10) return value.toFixed(1) + " s";
  if (value < 100) return Math.round(value) + " s";
  if (value < 5400) return Math.round(value / 60) + " min";
  if (value < 172800) return (value / 3600).toFixed(value < 36000 ? 1 : 0) + " h";
  return Math.round(value / 86400) + " d";
}

export function ago(time) {
  if (time == null) return "–";
  const past = now() - time;
  return past < 2 ? "now" : seconds(past) + " ago";
}

/** When it was, in full, for a title. */
export function date(time) {
  return time == null ? "" : new Date(time * 1000).toLocaleString();
}

export function count(value) {
  return value == null ? "–" : value.toLocaleString("en");
}

/** Three digits that say most. */
export function figure(value) {
  if (value == null || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e7)) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export const OUTCOMES = ["ok", "agent_exit", "agent_timeout", "budget", "infrastructure", "cancelled"];
export const STATES = [...OUTCOMES, "running", "queued"];

/** A rollout's state, or its outcome once finished. */
export function stateOf(rollout) {
  return rollout.outcome ?? rollout.state;
}

export function words(name) {
  return name.replaceAll("_", " ");
}

export function pill(state) {
  return h("span", { class: `pill ${state}` }, words(state));
}

export function button(title, onclick, name = "") {
  return h("button", { class: name, onclick }, title);
}

/** What stands where there is nothing else. */
export function empty(text) {
  return h("p", { class: "empty" }, text);
}

export function mean(values) {
  return values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null;
}

/** A bar of shares. `parts`: [class, number] pairs. */
export function shares(parts) {
  const total = parts.reduce((sum, [, n]) => sum + n, 0) || 1;
  const said = parts.filter(([, n]) => n).map(([name, n]) => `${words(name)} ${count(n)}`).join(", ");
  return h(
    "span", { class: "shares", title: said, role: "img", "aria-label": said },
    parts.filter(([, n]) => n).map(([name, n]) => h("i", { class: name, "--share": `${(100 * n) / total}%` })),
  );
}

/** What the shares mean, with numbers. */
export function legend(parts) {
  return h(
    "span", { class: "legend" },
    parts.filter(([, n]) => n).map(([name, n]) =>
      h("span", { class: "key" }, h("i", { class: name }), words(name), h("b", {}, count(n)))),
  );
}
