// Messages as they were delivered: text, reasoning, tool calls, tool declarations.

import { button, count, h } from "./dom.js";

const ROLES = ["system", "developer", "user", "assistant", "tool"];
const LONG = 1600; // characters that are shown before one has to ask for more
const DEEP = 30; // levels of a call's arguments that are drawn field by field

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
  return h("div", { class: `message ${ROLES.includes(message.role) ? message.role : ""}` },
    h("span", { class: "role" }, message.role, message.name && ` ${message.name}`),
    h("div", { class: "said" },
      reasoning && h("details", { open: true }, h("summary", {}, "reasoning"), folded(textOf(reasoning))),
      (text || !calls.length) && folded(text),
      calls.map((call) => h("div", { class: "call" }, h("b", {}, nameOf(call)), argumentsOf(call)))));
}

/** The tools that a request declares. */
export function drawTools(tools) {
  const title = `${count(tools.length)} ${tools.length === 1 ? "tool" : "tools"}: ${tools.map(nameOf).join(", ")}`;
  return h("details", { class: "tools" }, h("summary", {}, title),
    tools.map((tool) => h("pre", {}, pretty(tool))));
}

/** The fields of an object, each text as it stands; long ones fold. */
export function fieldsOf(object) {
  const shown = (value) => (isObject(value) ? fieldsOf(value) : folded(pretty(value)));
  const field = ([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, shown(value)));
  return h("dl", { class: "fields" }, Object.entries(object).map(field));
}

function nameOf(called) {
  return called.function?.name ?? called.name ?? called.type ?? "?";
}

/** What is no JSON, or nested too deep for the eye and the browser, is shown as the model left it. */
function argumentsOf(call) {
  const written = call.function?.arguments ?? call.input ?? "";
  let value = written;
  if (typeof written === "string") {
    try {
      value = JSON.parse(written);
    } catch {
      return folded(written);
    }
    if (isDeep(value)) return folded(written);
  }
  return isObject(value) ? fieldsOf(value) : folded(pretty(value));
}

function isDeep(value) {
  let level = [value];
  for (let depth = 0; depth < DEEP && level.length; depth++)
    level = level.flatMap((each) => (each != null && typeof each === "object" ? Object.values(each) : []));
  return level.length > 0;
}

function isObject(value) {
  return value != null && typeof value === "object" && !Array.isArray(value);
}

function folded(text) {
  if (text.length <= LONG) return h("pre", {}, text);
  const shown = h("pre", {}, text.slice(0, LONG) + "…");
  const all = () => ((shown.textContent = text), more.remove());
  const more = button(`Show all ${count(text.length)} characters`, all, "quiet");
  return [shown, more];
}

function pretty(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}
