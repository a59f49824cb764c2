// The timeline's surroundings: counters, legend, the table of slots, what is pointed at.

import { LOOKS, LOOK_NAMES, swatch } from "./looks.js";

const $ = (id) => document.getElementById(id);
const RATE_NS = 2e9;

export function setText(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}

export function showLegend() {
  const shown = LOOKS.map((look) => {
    const item = document.createElement("li");
    item.append(swatch(look), LOOK_NAMES[look]);
    return item;
  });
  shown.push(mark("cohort", "a cohort begins"), mark("seal", "it is sealed"));
  $("legend").replaceChildren(...shown);
}

function mark(name, text) {
  const item = document.createElement("li");
  const sign = document.createElement("i");
  sign.className = name;
  item.append(sign, text);
  return item;
}

// The figures at a time: the present, or the end of what is shown.
export function showCounters(history, nowNs) {
  const turn = history.turn(nowNs);
  const line = history.line(nowNs);
  const figure = history.figure(nowNs);
  const rates = history.rates(nowNs, RATE_NS);
  const seated = history.lanes.filter((lane, slot) => {
    const stretch = history.stretch(slot, lane.find(nowNs));
    return stretch && !["idle", "unknown"].includes(stretch.look);
  });
  const { slot_count: slots, page_count: pages } = history.head;
  setText("count-phase", turn ? turn.phase : "–");
  // Beside the name, since it comes and goes many times a second, and nothing may move for it.
  setText("count-cohort-name", turn?.sealed ? "Cohort, sealed" : "Cohort");
  setText("count-cohort", turn ? number(turn.cohort) : "–");
  setText("count-seated", history.head.names ? "–" : `${seated.length} of ${slots}`);
  setText("count-queue", line ? String(line.length) : "–");
  setText("count-pages", figure ? `${number(figure.reserved)} of ${number(pages)}` : "–");
  setText("count-prompt", rates ? number(Math.round(rates.prompt)) : "–");
  setText("count-answer", rates ? number(Math.round(rates.answer)) : "–");
}

const number = (value) => value.toLocaleString("en-US");

// One row per slot as it is now.  Rows are kept, so that a reader's place in the table is, too.
export function showSlots(history) {
  const body = $("slots");
  while (body.rows.length > history.head.slot_count) body.deleteRow(-1);
  while (body.rows.length < history.head.slot_count) {
    const row = body.insertRow();
    row.insertAdjacentElement("beforeend", document.createElement("th")).scope = "row";
    for (let i = 0; i < 3; i++) row.insertCell();
  }
  history.lanes.forEach((lane, slot) => {
    const s = history.stretch(slot, lane.length - 1);
    const cells = body.rows[slot].cells;
    const texts = [history.head.names?.[slot] ?? String(slot), "", "", ""];
    if (s) {
      texts[1] = LOOK_NAMES[s.look];
      texts[2] = s.request >= 0 ? `#${s.request}` : "";
      texts[3] = s.reason ? history.head.reasons[s.reason] ?? s.reason : "";
      if (s.waitsFor.length) texts[3] += ` (${s.waitsFor.map((id) => `#${id}`).join(", ")})`;
    }
    texts.forEach((text, i) => {
      if (cells[i].textContent !== text) cells[i].textContent = text;
    });
  });
}

export function showTip(shown, x, y, width) {
  const tip = $("tip");
  tip.hidden = !shown;
  if (!shown) return;
  const title = document.createElement("strong");
  title.textContent = shown.title;
  tip.replaceChildren(title);
  for (const line of shown.lines) {
    const item = document.createElement("span");
    item.textContent = line;
    tip.append(item);
  }
  const left = Math.max(4, Math.min(x + 12, width - tip.offsetWidth - 4));
  tip.style.left = `${left}px`;
  tip.style.top = `${y + 14}px`;
}

export function readoutText(shown, startNs) {
  if (!shown) return "nothing is known of that";
  const begins = ((shown.from - startNs) / 1e9).toFixed(6);
  return `${[shown.title, ...shown.lines].join(". ")}. Begins at ${begins} s.`;
}
