"""The report: findings, tables and figures from a results file, in a terminal and as one HTML page."""
