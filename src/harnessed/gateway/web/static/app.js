// The application: which page an address shows, the frame around it, and the login.

import { button, h } from "./dom.js";
import { showGroup } from "./group.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { Refused, logIn, logOut } from "./server.js";
import { showTranscripts } from "./transcript.js";

const PAGES = new Map([["", showRuns], ["run", showRun], ["group", showGroup], ["rollout", showTranscripts]]);
const top = document.getElementById("top");
const page = document.getElementById("page");
let leaving = new AbortController();

async function go() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  if (await loggedInByAddress()) return;
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [kind, ...names] = path.split("/");
  const show = PAGES.get(kind);
  frame([]);
  page.className = show ? kind || "runs" : "";
  try {
    if (!show) throw new Refused(404, `there is no page ${location.hash}`);
    const asked = Object.fromEntries(new URLSearchParams(query));
    await show({ page, frame, names: names.map(decoded), query: asked, signal });
  } catch (error) {
    if (!signal.aborted) fail(error);
  }
}

function decoded(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    throw new Refused(404, `${location.hash} is not a whole address`);
  }
}

/** `#key=...` logs in and leaves the address at once; the part after # is never sent to a server. */
async function loggedInByAddress() {
  const key = location.hash.match(/^#key=(.+)$/)?.[1];
  if (!key) return false;
  history.replaceState(null, "", location.pathname + "#/");
  try {
    await logIn(key);
  } catch (error) {
    askForKey(error.message);
    return true;
  }
  return false;
}

/** The line above a page: where one is. `crumbs`: [text, address] pairs. */
function frame(crumbs) {
  document.title = ["Harnessed", ...crumbs.map(([text]) => text)].reverse().join(" · ");
  top.replaceChildren(
    h("a", { class: "brand", href: "#/" }, h("img", { src: "icon.svg", alt: "" }), "Harnessed"),
    h("nav", {}, crumbs.map(([text, href]) => [h("i", {}, "/"), href ? h("a", { href }, text) : h("b", {}, text)])),
    h("span", { class: "link", title: "whether the gateway answers" }),
    button("Log out", leave, "quiet"),
  );
}

async function leave() {
  try {
    await logOut();
    askForKey();
  } catch (error) {
    leaving.abort();
    fail(error, "You are still logged in: the gateway was not told");
  }
}

function fail(error, title = "This page cannot be shown") {
  if (error instanceof Refused && error.status === 401) return askForKey();
  const back = h("a", { href: "#/", onclick: go }, "All runs"); // where that is the address already, nothing changes
  page.replaceChildren(h("section", { class: "failure" }, h("h2", {}, title), h("p", {}, error.message), back));
}

function askForKey(complaint = "") {
  leaving.abort();
  const key = h("input", { type: "password", name: "key", placeholder: "sk-hd.admin.…", "aria-label": "admin key" });
  const said = h("p", { class: "complaint", role: "alert" }, complaint);
  const enter = async (event) => {
    event.preventDefault();
    try {
      await logIn(key.value);
      await go();
    } catch (error) {
      said.textContent = error.message;
    }
  };
  top.replaceChildren();
  page.className = "login";
  page.replaceChildren(
    h("form", { onsubmit: enter },
      h("img", { src: "icon.svg", alt: "" }), h("h1", {}, "Harnessed"),
      h("p", {}, "The gateway's admin key opens the dashboard: ", h("code", {}, "admin.key"), " in its folder."),
      key, h("button", { class: "main" }, "Log in"), said),
  );
  key.focus();
}

addEventListener("hashchange", go);
go();
