// On paper nothing scrolls: what is wider than a page is printed smaller.
addEventListener("beforeprint", () => {
  const page = 650; // CSS pixels of an upright A4 page inside its margins
  for (const node of document.querySelectorAll("article div.math, article table")) {
    node.style.zoom = "";
    const { width } = node.style;
    if (node.tagName === "TABLE") node.style.width = "1px"; // its narrowest
    const needs = node.tagName === "TABLE" ? node.offsetWidth : node.scrollWidth;
    node.style.width = width;
    if (needs > page) node.style.zoom = page / needs;
  }
});
addEventListener("afterprint", () => {
  for (const node of document.querySelectorAll("article div.math, article table")) {
    node.style.zoom = "";
  }
});
