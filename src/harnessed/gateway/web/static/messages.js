// Messages as they were delivered: text, reasoning, tool calls, tool declarations.

import { count, h } from "./dom.js";

const LONG = 1600; // characters that are shown before one has to ask for more

/** The text of a message's content, whatever form its protocol gave it. */
export function textOf(content) {
  if (content == null) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content, null, 2);
  return content.map((part) => (typeof part === "string" ? part : part?.text ?? JSON.stringify(part))).join("\n");
}

/** A message with who says it. */
export function drawMessage(message) {
  const reasoning = message.reasoning_content ?? message.reasoning;
  const text = textOf(message.content);
  const calls = message.tool_calls ?? [];
  return h("div", { class: `message ${["system", "developer", "user", "assistant", "tool"].includes(message.role) ? message.role : "other"}` },
    h("span", { class: "role" }, message.role, message.name && ` ${message.name}`),
    h("div", { class: "said" },
      reasoning && h("details", { class: "reasoning", open: true }, h("summary", {}, "reasoning"), folded(textOf(reasoning))),
      (text || !calls.length) && folded(text),
      calls.map((call) => h("div", { class: "call" }, h("b", {}, call.function?.name ?? call.type ?? "call"), argumentsOf(call)))));
}

/** The tools that a request declares. */
export function drawTools(tools) {
  return h("details", { class: "tools" },
    h("summary", {}, `${count(tools.length)} ${tools.length === 1 ? "tool" : "tools"}: `, tools.map((tool) => tool.function?.name ?? tool.name ?? tool.type).join(", ")),
    tools.map((tool) => h("pre", {}, pretty(tool))));
}

/** The fields of an object, each text as it stands; long ones fold. */
export function fieldsOf(object) {
  return h("dl", { class: "fields" }, Object.entries(object).map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, isObject(value) ? fieldsOf(value) : folded(typeof value === "string" ? value : JSON.stringify(value, null, 2))))));
}

/** Of a call: one text needs no name, and what is no JSON is shown as the model left it. */
function argumentsOf(call) {
  const written = call.function?.arguments ?? call.input ?? "";
  let value = written;
  try {
    value = typeof written === "string" ? JSON.parse(written) : written;
  } catch {
    return folded(written);
  }
  return isObject(value) ? fieldsOf(value) : folded(pretty(value));
}

function isObject(value) {
  return value != null && typeof value === "object" && !Array.isArray(value);
}

function folded(text) {
  if (text.length <= LONG) return h("pre", {}, text);
  const shown = h("pre", {}, text.slice(0, LONG) + "…");
  const more = h("button", { class: "quiet", onclick: () => ((shown.textContent = text), more.remove()) }, `Show all ${count(text.length)} characters`);
  return [shown, more];
}

function pretty(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}
