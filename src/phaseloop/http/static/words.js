// Times and stretches in words.

import { LOOK_NAMES } from "./looks.js";

export function durationText(ns) {
  const seconds = ns / 1e9;
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function describeTurn(history, at) {
  const i = history.turns.find(at);
  const turn = history.turn(at);
  if (!turn) return null;
  const times = history.turns.columns.at;
  const to = i + 1 < history.turns.length ? times[i + 1] : history.nowNs;
  const seal = turn.sealed ? "sealed: who arrives now belongs to the next" : "open";
  const title = `${turn.phase} for ${durationText(to - turn.from)}`;
  return { from: turn.from, to, title, lines: [`cohort ${turn.cohort}, ${seal}`, turn.policy] };
}

export function describeLine(history, at) {
  const i = history.queue.find(at);
  const line = history.line(at);
  if (!line) return null;
  const times = history.queue.columns.at;
  const to = i + 1 < history.queue.length ? times[i + 1] : history.nowNs;
  const title = line.length === 1 ? "1 request waits" : `${line.length} requests wait`;
  const lines = line.reason
    ? [`#${line.request} is first: ${history.head.reasons[line.reason] ?? line.reason}`]
    : [];
  return { from: times[i], to, title, lines };
}

export function describeStretch(history, lane, at, nowNs) {
  const series = history.lanes[lane.slot];
  const s = history.stretch(lane.slot, series.find(at));
  if (!s) return null;
  const to = s.isLast ? nowNs : s.to;
  const who = s.request >= 0 ? `, request ${s.request}${s.choice ? `, choice ${s.choice}` : ""}` : "";
  const title = `${lane.name}: ${LOOK_NAMES[s.look]} for ${durationText(to - s.from)}${who}`;
  const lines = [];
  if (s.reason) lines.push(`${s.reason}: ${history.head.reasons[s.reason] ?? ""}`);
  else if (s.look !== "unknown") lines.push(history.head.looks[s.look] ?? "");
  if (s.waitsFor.length) lines.push(`waits for ${s.waitsFor.map((id) => `#${id}`).join(", ")}`);
  return { from: s.from, to, title, lines };
}

export function niceStep(ns) {
  const steps = [1, 2, 5];
  for (let unit = 1e3; unit < 1e10; unit *= 10) {
    for (const step of steps) if (unit * step >= ns) return unit * step;
  }
  for (const seconds of [10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400]) {
    if (seconds * 1e9 >= ns) return seconds * 1e9;
  }
  return Math.ceil(ns / 86400e9) * 86400e9;
}

export function axisText(at, step) {
  const seconds = at / 1e9;
  if (step < 1e9) {
    const digits = Math.max(0, Math.ceil(-Math.log10(step / 1e9)));
    return `${seconds.toFixed(digits)} s`;
  }
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}
