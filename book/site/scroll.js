// A formula or table that is wider than its box scrolls there, by keyboard
// too, and fades where it goes on. A table that fits needs no box.
const SCROLLS =
  "article div.math, article .pst-scrollable-table-container, " +
  "article .output.text_html:has(table)";
document.addEventListener("DOMContentLoaded", () => {
  const look = (box) => {
    const rest = box.scrollWidth - box.clientWidth;
    box.classList.toggle("bft-fits", rest < 2);
    box.classList.toggle("bft-more", rest - box.scrollLeft >= 2);
    if (rest < 2) box.removeAttribute("tabindex");
    else box.tabIndex = 0;
  };
  const watch = new ResizeObserver((changes) => {
    for (const { target } of changes) look(target.closest(SCROLLS));
  });
  for (const box of document.querySelectorAll(SCROLLS)) {
    for (const part of [box, ...box.children]) watch.observe(part);
    box.addEventListener("scroll", () => look(box), { passive: true });
  }
});
