"""The report: what one reader learned about one machine, in a terminal and as one HTML page.

Tables, charts and cards are data (`pieces`); the page, the terminal and Markdown print them in their own way.

What is said:
    card                  the figures of this machine that the report opens with
    findings              short sentences computed from results
    decided_comparisons   results that belong together; how many are faster, slower, undecided
    ladders               the ladders of matrix products: each rung's speed, and its share of the library's
    chapters              the chapters, as data: which results belong to each, and what it opens with
How it looks:
    pieces                what a page consists of: tables, charts, cards, findings
    tables                results sorted into sections, and their tables
    bars                  charts that are rows of bars, in HTML
    curves                charts with two axes, in SVG; `figures` has their sizes and colours
Where it is shown:
    page                  the HTML page, from `templates`, page.css and page.js, with a note on each number
    printed               the terminal, JSON and Markdown
"""
