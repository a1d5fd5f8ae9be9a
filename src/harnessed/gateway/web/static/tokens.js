// The tokens of an answer and of what stood before it, coloured, with everything known about each under the pointer.

import { button, count, h, words } from "./dom.js";

const SHOWN = 240; // prompt tokens before an answer that are shown at first
const TIP = h("div", { class: "tip", role: "tooltip", hidden: true });
document.body.append(TIP);

/** Draw a node's tokens. `colour`: fate, logprob or version. */
export function drawTokens(node, tokens, fate, colour) {
  const answer = tokens.answer.map((id, at) => ({
    id, text: tokens.texts[id], logprob: tokens.logprobs[at], version: tokens.versions[at], fate, at: at + 1,
  }));
  const segment = tokens.segment.map((id) => ({ id, text: tokens.texts[id] }));
  const begin = h("span", { class: "segment" });
  const show = (from) => {
    const more = from > 0 ? button(`Show ${count(from)} prompt tokens before`, () => show(0), "quiet") : "";
    begin.replaceChildren(more, ...segment.slice(from).map((token) => span(token, "prompt")));
  };
  show(segment.length > SHOWN * 1.5 ? segment.length - SHOWN : 0);
  const versions = [...new Set(tokens.versions)];
  const cut = node.cut > 0 && h("p", { class: "note" }, "Without the last stop: history writes another.");
  return h("div", { class: "tokens", onpointerover: tip, onpointerleave: hide },
    cut, begin, answer.map((token) => span(token, look(token, colour, versions))));
}

function look(token, colour, versions) {
  if (colour === "fate") return `sampled ${token.fate}`;
  if (colour === "version") return `sampled version${versions.indexOf(token.version) % 4}`;
  return "sampled heat";
}

/** How surprising a token was, 0 (certain) to 100 (one in about 150). */
function heat(logprob) {
  return `${Math.round(Math.min(1, -logprob / 5) * 100)}%`;
}

function span(token, name) {
  const share = token.logprob == null ? "0%" : heat(token.logprob);
  const element = h("span", { class: `token ${name}`, "--share": share }, token.text.replaceAll("\n", "⏎\n"));
  element.token = token;
  return element;
}

function tip(event) {
  const { token } = event.target;
  if (!token) return hide();
  const facts = [["token", JSON.stringify(token.text)], ["id", token.id]];
  if (token.fate) {
    facts.push(["log-probability", probability(token.logprob)], ["policy version", versionOf(token.version)]);
    facts.push(["fate", words(token.fate)], ["place", token.at]);
  } else facts.push(["", "prompt: not sampled"]);
  TIP.replaceChildren(...facts.map(([name, value]) => h("div", {}, h("span", {}, name), h("b", {}, String(value)))));
  TIP.hidden = false;
  const box = event.target.getBoundingClientRect();
  const { width, height } = TIP.getBoundingClientRect();
  TIP.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  TIP.style.top = `${box.bottom + height + 14 > innerHeight ? box.top - height - 8 : box.bottom + 8}px`;
}

export function hide() {
  TIP.hidden = true;
}

function probability(logprob) {
  return logprob == null ? "none" : `${logprob.toFixed(4)} (${(100 * Math.exp(logprob)).toFixed(1)} %)`;
}

/** As the trainer writes it: lineage and number. */
function versionOf(packed) {
  return packed < 0 ? "the engine does not say" : `${packed >> 20}.${packed & 0xfffff}`;
}
