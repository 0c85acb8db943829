"""Show records as terminal tables, pages and plots.

A *record* is the plain data of a result, as its JSON file holds it. This package imports no torch and computes no statistics.

:mod:`~castwise.report.show` makes a table or a page of any record. The text for each kind of record is in
:mod:`~castwise.report.bench`, :mod:`~castwise.report.tune`, :mod:`~castwise.report.doctor`, :mod:`~castwise.report.parity` and
:mod:`~castwise.report.train`. All of them share the formatting of numbers (:mod:`~castwise.report.words`), the tables
(:mod:`~castwise.report.grids`) and the style of the plots (:mod:`~castwise.report.plots`).
"""
