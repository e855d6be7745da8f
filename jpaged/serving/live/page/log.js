/** What happens, in words that explain it. */

const MOST = 60;
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

const WORDS = {
  hit: (event, facts) => {
    const whole = Math.floor(event.tokens / facts.block_size);
    const gain = whole ? `${plural(whole, "block")} shared, nothing to compute for them` : "most of a block copied, not computed";
    return ["prefix hit", `#${event.number} begins like a text in the cache: ${event.tokens} of ${event.prompt} prompt tokens found; ${gain}.`];
  },
  copy: (event) => [
    "copy-on-write",
    event.shared
      ? `Block ${event.source} → ${event.destination}, because two branches shared it and one of them writes on.`
      : `Block ${event.source} → ${event.destination}, so that the cached original stays as it is.`,
  ],
  preempt: (event) => [
    "preemption",
    event.swapped
      ? `The pool was full: #${event.number} gave way, and its blocks wait in the host's memory.`
      : `The pool was full: #${event.number} gave its blocks to older requests; they will be computed again.`,
  ],
  resume: (event) => [
    "back again",
    event.swapped ? `#${event.number} has its blocks back from the host.` : `#${event.number} has room again and computes what it had.`,
  ],
  fork: (event) => ["fork", `#${event.number} goes on in ${event.branches} branches that share the blocks of its prompt.`],
  end: (event, facts) => {
    const how = event.reason === "abort" ? "was stopped" : "ended";
    const kept = facts.caching ? "its blocks are free, and full ones stay cached" : "its blocks are free";
    return ["end", `#${event.number} ${how} after ${plural(event.tokens, "token")}; ${kept}.`];
  },
};

export class Log {
  last = 0;

  constructor(element) {
    this.element = element;
  }

  /** Adds those events that are new, and returns them. */
  add(events, facts) {
    if (events.length && events.at(-1).serial < this.last) this.last = 0; // another server's
    const fresh = events.filter((event) => event.serial > this.last);
    for (const event of fresh) {
      const [name, text] = WORDS[event.kind](event, facts);
      const item = document.createElement("li");
      const label = document.createElement("span");
      label.className = `label ${event.kind}`;
      label.textContent = name;
      item.append(label, ` ${text}`);
      this.element.prepend(item);
      this.last = event.serial;
    }
    while (this.element.children.length > MOST) this.element.lastChild.remove();
    return fresh;
  }
}
