/** Scrolling areas that stay at their end while the reader is there. */

const NEAR_END_PX = 60;

/** Makes a change that may grow a scrolling area, and keeps its end in sight if it was. */
export function keepEnd(area, change) {
  const { scrollHeight, scrollTop, clientHeight } = area;
  change();
  if (scrollHeight - scrollTop - clientHeight < NEAR_END_PX) area.scrollTop = area.scrollHeight;
}
