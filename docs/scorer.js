// Pages in the language of the search come first.
var Scorer = {
  score: ([page, , , , score]) =>
    score + (page.startsWith("zh/") === document.documentElement.lang.startsWith("zh") ? 1000 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
