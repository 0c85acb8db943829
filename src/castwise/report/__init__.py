"""Records to terminal tables, pages and plots. Works from plain data, imports no torch and computes no statistics.

:mod:`~castwise.report.show` makes a table or a page of any record. What each kind of record says stands in
:mod:`~castwise.report.bench`, :mod:`~castwise.report.tune`, :mod:`~castwise.report.doctor`,
:mod:`~castwise.report.parity` and :mod:`~castwise.report.train`; they share numbers in words
(:mod:`~castwise.report.words`), tables (:mod:`~castwise.report.grids`) and the look of pictures
(:mod:`~castwise.report.plots`).
"""
