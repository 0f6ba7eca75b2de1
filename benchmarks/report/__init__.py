"""The report: findings, tables and figures from results files, in a terminal and as one HTML page.

`sections` sorts the results, and everything else shows these or computes sentences from them. Tables, figures
and cards are data (`pieces`), which the page, the terminal and Markdown print in their own way. All figures
are SVG with text in words for readers who can't see them.

What is said:
    sections        sections of results
    verdicts        picks results that belong together; counts comparisons: faster, slower, undecided
    findings        the five findings
    answer          "What should I use?", from the memory model
    what_to_use     that answer as pieces of the page
    ladders         the ladders of matrix products: each rung's share of the library's speed
    tables          tables of results
    chapters        the chapters, as data: which results belong to each, and what it opens with
    pieces          what a page consists of: tables, figures, cards, findings
Where it is shown:
    page            the HTML page, from `templates`, page.css and page.js
    notes           its notes on how each number was measured
    terminal        the terminal
    documents       JSON and Markdown
Figures:
    figures         sizes, colours, legends, SVG
    plots           curves, predictions, goals and pairs of a section
    chapter_plots   what chapters open with: comparisons, memory, scaling, collectives, lessons
    rooflines       the ladders' bars and rooflines
    gantt           a pipeline's step, simulated and measured
"""
