// Puts the page together: the chat, the live feed, the timeline, and traces that are opened.

import { Chat } from "./chat.js";
import { Feed } from "./feed.js";
import { History } from "./history.js";
import { isDark } from "./looks.js";
import { setText, showCounters, showLegend, showSlots } from "./panel.js";
import { Pointing, ZOOM_STEP } from "./pointing.js";
import { getJson, keyInUse, useKey } from "./server.js";
import { Timeline } from "./timeline.js";
import { Builder, openTrace } from "./trace.js";
import { LineReader } from "./trace_reader.js";
import { durationText } from "./words.js";

const $ = (id) => document.getElementById(id);
const PANEL_MS = 250;
const CONNECTIONS = {
  live: "live",
  waiting: "the model is loading",
  lost: "no connection, trying again",
  locked: "wants a key",
};

const embedded = $("timeline-data"); // only in a page that `phaseloop replay --html` wrote
const timeline = new Timeline($("canvas"), showControls);
let live = null; // the history of the server
let shown = null; // what is on the screen
let panelMs = 0;

// --- theme --------------------------------------------------------------------------------------

function showTheme() {
  const name = isDark() ? "Light colours" : "Dark colours";
  $("theme").textContent = name;
  $("theme").setAttribute("aria-label", name);
  timeline.themeChanged();
  showLegend();
}

$("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);

// --- live ---------------------------------------------------------------------------------------

const feed = new Feed(onBatch, onConnection);

function onBatch(batch) {
  if (batch.head) {
    const isOther = !live || live.head.started !== batch.head.started || batch.now_ns < live.nowNs;
    if (isOther || live.head.slot_count !== batch.head.slot_count) {
      const wasShown = shown === live;
      live = new History(batch.head, batch.now_ns);
      live.add(batch);
      if (wasShown) show(live, true);
      return;
    }
  }
  if (!live) return;
  live.add(batch);
  if (shown === live) {
    timeline.received();
    showPanel();
  }
}

function onConnection(state, error) {
  setText("connection", CONNECTIONS[state]);
  $("connection").dataset.state = state;
  $("connection").title = error ? error.message : "";
  if (state === "locked") askForKey();
  if (state === "live" && !$("model").textContent) showModel();
}

async function showModel() {
  try {
    const models = await getJson("v1/models");
    setText("model", models.data[0].id);
  } catch {
    setText("model", "");
  }
}

// --- the key ------------------------------------------------------------------------------------

function askForKey() {
  $("key-open").hidden = false;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-open").addEventListener("click", askForKey);
$("key-cancel").addEventListener("click", () => $("key-dialog").close());
$("key-form").addEventListener("submit", () => {
  useKey($("key").value.trim());
  $("key").value = "";
  feed.start();
});

// --- what is shown ------------------------------------------------------------------------------

function show(history, isLive) {
  shown = history;
  timeline.show(history, isLive);
  $("live").hidden = isLive || embedded !== null;
  $("connection").hidden = !isLive;
  setText("source", isLive ? "" : history.head.source);
  showPanel(true);
  showControls();
}

function showPanel(isUrgent = false) {
  const now = performance.now();
  if (!shown || (!isUrgent && now - panelMs < PANEL_MS)) return;
  panelMs = now;
  // Of what is held still, the figures are those of the moment that is pointed at.
  const cursor = timeline.isFollowing ? null : timeline.cursor;
  showCounters(shown, cursor ? cursor.at : shown.nowNs);
  if ($("now").open) showSlots(shown);
}

function showControls() {
  const isPaused = !timeline.isFollowing;
  $("pause").hidden = !timeline.isLive;
  $("pause").setAttribute("aria-pressed", String(isPaused));
  setText("pause", isPaused ? "Follow" : "Pause");
  if (!timeline.history) return;
  if (isPaused) showPanel(true);
  setText("span", `${durationText(timeline.spanNs)} in view`);
  if (document.activeElement !== $("scroll")) $("scroll").value = String(1000 * timeline.place);
}

function togglePause() {
  if (!timeline.isLive) return;
  if (timeline.isFollowing) timeline.pause();
  else timeline.follow();
}

new Pointing(timeline, togglePause);
$("pause").addEventListener("click", togglePause);
$("zoom-in").addEventListener("click", () => timeline.zoom(1 / ZOOM_STEP));
$("zoom-out").addEventListener("click", () => timeline.zoom(ZOOM_STEP));
$("fit").addEventListener("click", () => timeline.fit());
$("live").addEventListener("click", () => show(live, true));
$("now").addEventListener("toggle", () => showPanel(true));
$("scroll").addEventListener("input", () => {
  if (timeline.history) timeline.place = Number($("scroll").value) / 1000;
});
setInterval(() => showPanel(), 1000); // rates fall when nothing comes any more

// --- traces -------------------------------------------------------------------------------------

let opening = null;

async function openFile(file) {
  opening?.abort();
  const mine = (opening = new AbortController());
  const bar = $("loading-bar");
  $("loading").hidden = false;
  $("notice").hidden = true;
  setText("loading-text", `Reading ${file.name}`);
  try {
    const progress = (share) => (bar.value = share);
    const result = await openTrace(file, progress, mine.signal);
    show(result.history, false);
    tellOfTrace(file.name, result);
  } catch (error) {
    if (error.name !== "AbortError") notice([error.message]);
  }
  if (opening === mine) {
    opening = null;
    $("loading").hidden = true;
  }
}

function tellOfTrace(name, { summary, isTorn }) {
  const lines = [];
  if (summary) {
    const { events, requests, rounds, tokens } = summary;
    const count = (value, word) => `${value.toLocaleString("en-US")} ${word}`;
    lines.push(
      `${name}: ${count(events, "events")}, ${count(requests, "requests")}, ` +
        `${count(rounds, "rounds")}, ${count(tokens, "tokens")}. A trace holds events, not what ` +
        "was decided: it shows when the engine worked, not which slot waited and why. For that, run",
    );
  }
  if (isTorn) lines.push("Its last line is torn and was left out.");
  if (lines.length) notice(lines, summary ? `phaseloop replay ${name} --html ${name}.html` : "");
}

function notice(lines, command = "") {
  const parts = lines.map((line) => Object.assign(document.createElement("p"), { textContent: line }));
  if (command) parts.splice(1, 0, Object.assign(document.createElement("code"), { textContent: command }));
  $("notice").replaceChildren(...parts);
  $("notice").hidden = false;
}

$("open").addEventListener("change", () => {
  const file = $("open").files[0];
  $("open").value = "";
  if (file) openFile(file);
});
$("loading-stop").addEventListener("click", () => opening?.abort());
const hasFiles = (event) => !embedded && event.dataTransfer?.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  $("drop").hidden = false;
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) $("drop").hidden = true;
});
addEventListener("drop", (event) => {
  $("drop").hidden = true;
  if (!hasFiles(event)) return;
  event.preventDefault();
  openFile(event.dataTransfer.files[0]);
});

// --- begin --------------------------------------------------------------------------------------

// In pieces, so that a large page can be looked at while it is read.
async function showEmbedded() {
  document.body.classList.add("viewer");
  const text = embedded.textContent;
  const reader = new LineReader(document.title);
  const builder = new Builder();
  const size = 1 << 20;
  $("loading").hidden = false;
  for (let from = 0; from < text.length; from += size) {
    for (const part of reader.pushText(text.slice(from, from + size))) builder.add(part.batches);
    $("loading-bar").value = from / text.length;
    await new Promise((resolve) => setTimeout(resolve));
  }
  for (const part of reader.end()) builder.add(part.batches);
  embedded.remove();
  $("loading").hidden = true;
  show(builder.history, false);
}

showTheme();
if (embedded) {
  showEmbedded().catch((error) => notice([error.message]));
} else {
  new Chat(askForKey);
  if (keyInUse()) $("key-open").hidden = false;
  feed.start();
}
