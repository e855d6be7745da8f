/** The colours of the theme for what is drawn on a canvas; page.css is where they are defined. */

const OWNERS = 8;
const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);

/** Of a request: neighbours in the order of arrival never look alike. */
export const ownerIndex = (number) => (number - 1) % OWNERS;

/** All colours as they are now, each [r, g, b]. */
export function colours() {
  const owners = Array.from({ length: OWNERS }, (_, i) => resolved(`--owner-${i}`));
  const names = ["card", "empty", "cached", "ink", "text", "quiet", "accent"];
  return { owners, ...Object.fromEntries(names.map((name) => [name, resolved(`--${name}`)])) };
}

export const css = ([r, g, b], alpha = 1) => `rgb(${r} ${g} ${b} / ${alpha})`;

export const mix = (a, b, share) => a.map((x, i) => Math.round(x + (b[i] - x) * share));

function resolved(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
}
