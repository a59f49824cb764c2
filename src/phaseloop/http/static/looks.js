// How each look is drawn: a colour that colour-blind people tell apart (after Okabe and Ito), and a
// pattern, so that colour is never the only sign.

export const TILE = 8;
export const LOOKS = [
  "unknown", "waiting", "prefill", "copy", "ready", "decode", "parked", "leaving", "idle",
];
export const LOOK_NAMES = {
  unknown: "not known",
  waiting: "waits for its turn",
  prefill: "prefill",
  copy: "copies state",
  ready: "ready, waits",
  decode: "decode",
  parked: "parked",
  leaving: "leaving",
  idle: "idle",
};

// [base, ink] in light and in dark; the ink draws the pattern.
const COLOURS = {
  light: {
    unknown: ["#ececec", "#c4c4c4"],
    waiting: ["#d3e9f8", "#5d9fc9"],
    prefill: ["#0072b2", "#58aede"],
    copy: ["#9a9a9a", "#5c5c5c"],
    ready: ["#f0b429", "#8a5d00"],
    decode: ["#009e73", "#009e73"],
    parked: ["#f2cfe2", "#b3558a"],
    leaving: ["#dcdcdc", "#dcdcdc"],
    idle: ["#f4f5f6", "#dfe2e5"],
  },
  dark: {
    unknown: ["#2c2f33", "#45494e"],
    waiting: ["#1f3a4d", "#5d9fc9"],
    prefill: ["#2f8fd0", "#7cc4f2"],
    copy: ["#7d8288", "#c0c4c8"],
    ready: ["#e0a31c", "#5c3e00"],
    decode: ["#18b088", "#18b088"],
    parked: ["#4d2a40", "#d98bb8"],
    leaving: ["#565b61", "#565b61"],
    idle: ["#1b2026", "#2a3038"],
  },
};

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen === "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

export function coloursOf(look) {
  return COLOURS[isDark() ? "dark" : "light"][look];
}

// Which pixels of a tile have the ink's colour.
const INKED = {
  unknown: (x, y) => (x + y) % 8 === 0 || (x - y + 8) % 8 === 0,
  waiting: (x, y) => x % 4 === 1 && y % 4 === 1,
  prefill: (x, y) => (x + y) % 8 < 2,
  copy: (x, y) => y % 4 === 0,
  ready: (x, y) => x % 4 === 0,
  decode: () => false,
  parked: (x, y) => x % 8 === 0 || y % 8 === 0,
  leaving: () => false,
  idle: (x, y) => y === 4 && x % 4 < 2,
};

function tileOf(look) {
  const [base, ink] = coloursOf(look);
  const tile = document.createElement("canvas");
  tile.width = tile.height = TILE;
  const context = tile.getContext("2d");
  context.fillStyle = base;
  context.fillRect(0, 0, TILE, TILE);
  context.fillStyle = ink;
  for (let y = 0; y < TILE; y++) {
    for (let x = 0; x < TILE; x++) {
      if (INKED[look](x, y)) context.fillRect(x, y, 1, 1);
    }
  }
  return tile;
}

// The pixels of a look's tile, row by row, as a canvas has them in memory.
export function pixelsOf(look) {
  const data = tileOf(look).getContext("2d").getImageData(0, 0, TILE, TILE).data;
  return new Uint32Array(data.buffer);
}

// A canvas that shows what a look looks like.
export function swatch(look) {
  const canvas = document.createElement("canvas");
  canvas.className = "swatch";
  canvas.width = 24;
  canvas.height = 16;
  canvas.setAttribute("aria-hidden", "true");
  const context = canvas.getContext("2d");
  context.fillStyle = context.createPattern(tileOf(look), "repeat");
  context.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}
