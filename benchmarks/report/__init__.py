"""The report: findings, tables and figures from results files, in a terminal and as one HTML page.

`report` sorts the results into sections, and everything else shows these or computes sentences from them.
All figures are SVG with text in words for readers who can't see them.

What is said:
    report             sections of results; the tables in a terminal; JSON
    short_form         only the findings and the answer: terminal, JSON, Markdown
    findings           picks the five findings
    findings_training  findings on strategies, ZeRO, scaling, pipelines, recomputing and goals
    findings_kernels   findings on matrix products and collectives
    finding            a sentence whose numbers know their results
    verdicts           counts comparisons: faster, slower, undecided
    answer             "What should I use?", from the memory model
    ladder             the table of the CUDA ladder
    side_by_side       the CPU ladder's share of NumPy's speed, on each machine
    chapters           the chapters, and which results belong to each
The HTML page:
    page               the whole file
    page_findings      its beginning: findings and answer
    page_chapters      one machine: its chapters, with figures and tables
    page_tables        tables of results
    page_notes         notes on how each number was measured
    page_html          pieces of HTML: table, figure, cell
    page.css, page.js  its style and its script
Figures:
    plots              curves, predictions, goals and pairs of a section
    figure_style       sizes, colours, legends, SVG
    ratio_plot         all comparisons at a glance
    roofline_figure    rooflines
    cpu_plots          the CPU ladder
    ladder_plots       the CUDA ladder
    collective_plots   collectives over the tensor's size
    scaling_plots      strong and weak scaling
    memory_bars        memory by part
    gantt              a pipeline's step, simulated and measured
    lesson_plots       the lessons' costs against par
"""
