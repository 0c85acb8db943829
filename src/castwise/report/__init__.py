"""Show records as terminal tables, pages and plots. Works on plain data, imports no torch and computes no statistics.

:mod:`~castwise.report.show` makes a table or a page of any record. The text for each kind of record is in
:mod:`~castwise.report.bench`, :mod:`~castwise.report.tune`, :mod:`~castwise.report.doctor`,
:mod:`~castwise.report.parity` and :mod:`~castwise.report.train`; they share the formatting of numbers
(:mod:`~castwise.report.words`), tables (:mod:`~castwise.report.grids`) and the style of plots
(:mod:`~castwise.report.plots`).
"""
