// A field above the tables of a page hides the rows that lack more than a quarter of the words that are typed: a message
// with its numbers and names is found, too, where the table has … for them. Sections without rows are hidden.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const field = document.querySelector("input.filter");
  if (!field) return;
  const rows = [...document.querySelectorAll(".bd-article tbody tr")].map((row) => [row, row.textContent.toLowerCase()]);
  const sections = [...document.querySelectorAll(".bd-article section section")].filter((part) => part.querySelector("tbody"));
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().match(/[a-z_]{2,}/g) || [];
    const missing = (text) => words.filter((word) => !text.includes(word)).length;
    for (const [row, text] of rows) row.hidden = missing(text) > words.length / 4;
    for (const part of sections) part.hidden = words.length > 0 && !part.querySelector("tbody tr:not([hidden])");
  });
});
