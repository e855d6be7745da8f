/** The part of the pool that the map draws: long idle runs of blocks in a large pool are folded into one cell each. */

const CELLS = [36, 30, 25, 21, 17, 14, 11, 9, 7, 5, 4, 3, 2]; // CSS pixels from one block to the next
const COMFORT = 21; // cells are not made smaller than this for blocks that are only cached
const CHUNK = 16; // neighbouring blocks that are drawn or folded together
const HEADROOM = 1.25; // room for growth, so that the scale changes rarely
const CALM = 4000; // milliseconds for which there must be room for larger cells before they become larger

export class View {
  cell = 0; // CSS pixels from one block to the next
  columns = 1;
  order = new Int32Array(0); // the block at each place, or ~block for a fold that begins with that block
  place = new Int32Array(0); // the place of each block, or of its fold
  #width = 0;
  #height = 0;
  #demand = 0; // blocks that should be drawn
  #touched = new Float64Array(0); // when a block of each chunk changed last; 0 for never
  #crowded = 0; // when there was last no room for larger cells

  constructor(pool) {
    this.pool = pool;
  }

  /** Set the width of the map, and its height as far as it can keep to one, in CSS pixels. */
  resize(width, height) {
    this.#width = width;
    this.#height = height - (height % CELLS[0]);
  }

  /** The height to reserve, so that the content below the map stays in its place when the scale changes. */
  get leastHeight() {
    return this.#room(CELLS[0]) < this.pool.numBlocks ? this.#height : 0;
  }

  /** Note which blocks have changed (null: perhaps all). Return whether `fit` should be called. */
  notice(changed, now) {
    const { numBlocks, states } = this.pool, numChunks = Math.ceil(numBlocks / CHUNK);
    if (this.#touched.length !== numChunks) this.#touched = new Float64Array(numChunks);
    for (const block of changed ?? []) this.#touched[Math.floor(block / CHUNK)] = now;
    const kept = this.#chunks((block) => states[block]), used = this.#chunks((block) => this.pool.references(block));
    for (const chunk of kept) this.#touched[chunk] ||= 1;
    this.#demand = Math.max(CHUNK * used.size, Math.min(CHUNK * kept.size, this.#room(COMFORT) / HEADROOM));
    if (this.place.length !== numBlocks) return true;
    for (let block = 0; block < numBlocks; block++) if (this.pool.references(block) && this.isFolded(block)) return true;
    if (this.#largest() <= this.cell) this.#crowded = now;
    return now - this.#crowded > CALM;
  }

  /** Choose the scale and the blocks that are drawn. */
  fit(now) {
    if (now - this.#crowded > CALM || !this.#fits(this.cell, 1)) this.cell = this.#largest();
    this.#crowded = now;
    this.columns = Math.max(1, Math.floor(this.#width / this.cell));
    const room = this.#room(this.cell);
    this.#arrange(room < this.pool.numBlocks ? this.#choose(Math.max(1, Math.floor(room / CHUNK))) : null);
  }

  isFolded(block) {
    return this.order[this.place[block]] < 0;
  }

  /** Return the last block of the fold that begins with `block`. */
  endOfFold(block) {
    let end = block;
    while (this.place[end + 1] === this.place[block]) end += 1;
    return end;
  }

  #room(cell) {
    return Math.floor(this.#width / cell) * Math.floor(this.#height / cell);
  }

  #fits(cell, headroom) {
    return cell > 0 && this.#room(cell) >= Math.min(this.pool.numBlocks, headroom * this.#demand);
  }

  #largest() {
    return CELLS.find((cell) => this.#fits(cell, HEADROOM)) ?? CELLS.at(-1);
  }

  /** Return the chunks with a block that passes the test. */
  #chunks(test) {
    const found = new Set(), n = this.pool.numBlocks;
    for (let first = 0; first < n; first += CHUNK) {
      let block = first;
      while (block < first + CHUNK && block < n && !test(block)) block += 1;
      if (block < first + CHUNK && block < n) found.add(first / CHUNK);
    }
    return found;
  }

  /** Return all chunks in use, the chunks used last, and the chunks after them, where the pool probably goes on. */
  #choose(slots) {
    const touched = this.#touched, chosen = this.#chunks((block) => this.pool.references(block));
    const recent = [...touched.keys()].filter((chunk) => touched[chunk]).sort((a, b) => touched[b] - touched[a]);
    for (const chunk of recent) if (chosen.size < slots / HEADROOM) chosen.add(chunk);
    for (let i = 0; i < touched.length && chosen.size < slots; i++) chosen.add(((recent[0] ?? 0) + i) % touched.length);
    return chosen;
  }

  /** Give each block a place. `chosen`: the chunks that are drawn, or null for all. */
  #arrange(chosen) {
    const n = this.pool.numBlocks, order = [], end = chosen ? CHUNK * (1 + Math.max(...chosen)) : n;
    this.place = new Int32Array(n);
    for (let block = 0; block < n; block++) {
      const folding = order.at(-1) < 0;
      const fills = block >= end && !folding && (order.length + 1) % this.columns !== 0; // the last row ends in the fold
      if (fills || !chosen || chosen.has(Math.floor(block / CHUNK))) order.push(block);
      else if (!folding) order.push(~block);
      this.place[block] = order.length - 1;
    }
    this.order = Int32Array.from(order);
  }
}
