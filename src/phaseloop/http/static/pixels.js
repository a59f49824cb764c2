// Fills lanes pixel by pixel: the cost depends on the size of the lane, not on how much happened.

import { LOOKS, TILE, pixelsOf } from "./looks.js";

const NOTHING = 255; // a column without a look

export class Pixels {
  constructor(context) {
    this.context = context;
    this.themeChanged();
  }

  themeChanged() {
    const tiles = LOOKS.map(pixelsOf);
    this.tiles = new Uint32Array(LOOKS.length * TILE * TILE);
    tiles.forEach((tile, look) => this.tiles.set(tile, look * TILE * TILE));
  }

  // The area of a lane, in pixels of the device.
  begin(left, top, width, height) {
    const ratio = window.devicePixelRatio || 1;
    this.ratio = ratio;
    this.place = [Math.round(left * ratio), Math.round(top * ratio)];
    this.width = Math.max(1, Math.round(width * ratio));
    this.height = Math.max(1, Math.round(height * ratio));
    if (this.image?.width !== this.width || this.image.height !== this.height) {
      this.image = this.context.createImageData(this.width, this.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.columns = new Uint8Array(this.width);
    }
    this.pixels.fill(0);
    this.columns.fill(NOTHING);
    this.done = 0;
  }

  // One look between two columns, after all that were before it.  Whatever lasted at all gets a
  // column, unless that has been taken.
  stretch(look, from, to) {
    const start = Math.max(0, Math.round(from));
    let end = Math.min(this.width, Math.round(to));
    if (end <= start && to > from && start >= this.done) end = start + 1;
    if (end <= this.done) return;
    this.columns.fill(look, Math.max(start, this.done), end);
    this.done = end;
  }

  // Paints the stretches.  `shift` is where the patterns begin.
  endStretches(shift) {
    const { columns, pixels, tiles, width, height, ratio } = this;
    const places = new Uint8Array(width);
    for (let x = 0; x < width; x++) places[x] = modulo(Math.floor(x / ratio - shift), TILE);
    for (let y = 0; y < height; y++) {
      const row = (Math.floor(y / ratio) % TILE) * TILE;
      for (let x = 0; x < width; x++) {
        const look = columns[x];
        if (look === NOTHING) continue;
        pixels[y * width + x] = tiles[look * TILE * TILE + row + places[x]];
      }
    }
    this.context.putImageData(this.image, ...this.place);
  }

  // One column as a pile of looks by their shares, which add up to `whole`.
  pile(x, shares, whole) {
    const { pixels, tiles, width, height } = this;
    let y = 0;
    let sum = 0;
    for (let look = 0; look < LOOKS.length; look++) {
      sum += shares[look];
      const end = Math.min(height, Math.round((height * sum) / whole));
      const colour = tiles[look * TILE * TILE + BASE];
      for (; y < end; y++) pixels[y * width + x] = colour;
    }
  }

  endPiles() {
    this.context.putImageData(this.image, ...this.place);
  }
}

const BASE = 3 * TILE + 2; // a pixel that has the base colour in every tile

function modulo(value, by) {
  return ((value % by) + by) % by;
}
