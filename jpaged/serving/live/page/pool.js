/** The state of the KV pool, kept up to date by the frames of the feed. */

const CACHED = 128; // a bit of a block's state; the others count its references

export class Pool {
  numBlocks = 0;
  owners = new Uint16Array(0); // the number of the first request that holds a block; 0 for none
  writers = new Uint16Array(0); // the last owner of each block that this page has seen; 0 for none
  states = new Uint8Array(0); // references, at most 127, and CACHED
  facts = null;
  frame = 0;
  #planes = new Uint8Array(0);

  /** Takes a frame in. Returns which blocks changed, or null if all may have. */
  async apply(frame) {
    const bytes = await inflate(frame.map);
    if (!frame.whole && frame.frame !== this.frame + 1) throw new Error("a frame of the feed is missing");
    const n = frame.num_blocks;
    if (bytes.length !== 3 * n) throw new Error(`${bytes.length} bytes do not describe ${n} blocks`);
    let changed = null;
    if (frame.whole) {
      this.numBlocks = n;
      this.owners = new Uint16Array(n);
      if (this.writers.length !== n) this.writers = new Uint16Array(n);
      this.states = new Uint8Array(n);
      this.#planes = bytes;
      for (let i = 0; i < n; i++) this.#decode(i);
    } else {
      changed = [];
      for (let i = 0; i < n; i++) {
        if (!(bytes[i] | bytes[n + i] | bytes[2 * n + i])) continue;
        for (const at of [i, n + i, 2 * n + i]) this.#planes[at] ^= bytes[at];
        this.#decode(i);
        changed.push(i);
      }
    }
    this.facts = frame;
    this.frame = frame.frame;
    return changed;
  }

  #decode(i) {
    const n = this.numBlocks, planes = this.#planes;
    this.owners[i] = planes[i] | (planes[n + i] << 8);
    this.states[i] = planes[2 * n + i];
    if (this.owners[i] || !this.states[i]) this.writers[i] = this.owners[i];
  }

  references(i) {
    return this.states[i] & (CACHED - 1);
  }

  isCached(i) {
    return (this.states[i] & CACHED) !== 0;
  }

  /** What a block is: "shared", "owned", "cached" or "empty". */
  kind(i) {
    const references = this.references(i);
    if (references > 1) return "shared";
    if (references === 1) return "owned";
    return this.isCached(i) ? "cached" : "empty";
  }

  /** How many blocks there are of each kind. */
  counts() {
    const counts = { owned: 0, shared: 0, cached: 0, empty: 0 };
    for (let i = 0; i < this.numBlocks; i++) counts[this.kind(i)] += 1;
    return counts;
  }

  /** The blocks of the listed tables that are not full, and the share of each that holds computed tokens. */
  filling() {
    const shares = new Map(), size = this.facts?.block_size;
    for (const { branches } of this.facts?.requests ?? []) {
      for (const { computed, table } of branches) {
        for (let at = Math.floor(computed / size); at < table.length; at++) {
          shares.set(table[at], Math.max(0, computed / size - at, shares.get(table[at]) ?? 0));
        }
      }
    }
    return shares;
  }

  /** Blocks that a request holds, as far as the map and the listed tables tell. */
  blocksOf(number) {
    const blocks = new Set();
    for (let i = 0; i < this.numBlocks; i++) if (this.owners[i] === number) blocks.add(i);
    const listed = this.facts?.requests.find((request) => request.number === number);
    for (const branch of listed?.branches ?? []) for (const block of branch.table) blocks.add(block);
    return blocks;
  }

  /** The places of a block in the listed tables: whose, which branch, and at which of its blocks. */
  places(block) {
    const found = [];
    for (const request of this.facts?.requests ?? []) {
      request.branches.forEach((branch, index) => {
        const at = branch.table.indexOf(block);
        if (at >= 0) found.push({ request, branch: index, at });
      });
    }
    return found;
  }
}

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
