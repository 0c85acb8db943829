"""Records to terminal tables, pages and plots. Works from plain data, imports no torch and computes no statistics.

:mod:`~castwise.report.bench`, :mod:`~castwise.report.tune`, :mod:`~castwise.report.doctor` and
:mod:`~castwise.report.parity` say what each found; they share numbers in words (:mod:`~castwise.report.words`), tables
(:mod:`~castwise.report.grids`), the page (:mod:`~castwise.report.page`) and the look of pictures
(:mod:`~castwise.report.plots`, :mod:`~castwise.report.curves`).
"""
