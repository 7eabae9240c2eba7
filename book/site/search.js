// How Sphinx's search ranks and shows what it finds; it reads this after its
// own settings. Pages that say a thing come before functions that do it.
Object.assign(Scorer, {
  objNameMatch: 8,
  objPartialMatch: 2,
  objPrio: { 0: 3, 1: 2, 2: -5 },
  score: ([page, title, , description, score]) => {
    const asked = new URLSearchParams(location.search).get("q").toLowerCase();
    if (description === null && title.toLowerCase().includes(asked)) score += 5;
    if (description?.startsWith("Python attribute")) score -= 6;
    if (/\/(api|bibliography|changes|slips)/.test(page)) score -= 3;
    const chapter = page.match(/^notebooks\/(\d+)-/);
    return chapter ? score + 1 - chapter[1] / 100 : score; // in their order
  },
});

// From a folder no page can be read: it has results without excerpts.
if (location.protocol === "file:")
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// An excerpt begins at a word that was asked for, in prose where it is there,
// else in code; never in what is folded.
Search.makeSearchSummary = (html, words, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  const part =
    (anchor && page.getElementById(anchor.slice(1))) ||
    page.querySelector("article");
  if (!part) return null;
  const drop =
    "h1, details.hide, nav, .toctree-wrapper, .headerlink, script, style, svg";
  for (const node of part.querySelectorAll(drop)) node.remove();
  const code = [...part.querySelectorAll(".cell, .highlight, .math.display")];
  for (const node of code) node.remove();
  const text = [part, ...code.filter((node) => !node.matches(".math"))]
    .map((node) => node.textContent.replace(/\\[()]/g, "").trim())
    .join(" ")
    .replace(/\s+/g, " ");
  const asked = [...words].map(_escapeRegExp).join("|");
  const found = text.search(new RegExp(`(?<![\\p{L}\\d_])(${asked})`, "iu"));
  const start = found < 120 ? 0 : text.indexOf(" ", found - 120) + 1;
  const excerpt = document.createElement("p");
  excerpt.className = "context";
  excerpt.textContent =
    (start ? "… " : "") +
    text.slice(start, start + 240) +
    (start + 240 < text.length ? " …" : "");
  return excerpt;
};
