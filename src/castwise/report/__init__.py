"""Records to terminal tables, pages and plots. Works from plain data and imports no torch.

Rooms: :mod:`~castwise.report.text` (numbers and answers in words), :mod:`~castwise.report.tables` (terminal),
:mod:`~castwise.report.plots` (pictures) and :mod:`~castwise.report.page` (the page that holds them all).
"""
