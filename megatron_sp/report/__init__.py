"""Report on one or several runs as a self-contained HTML page.

``reading`` and ``time_use`` collect the contents, ``curves`` and ``charts`` the data of the charts, ``svg`` and ``html`` render them,
``sections`` and ``page`` assemble the page; ``page.css`` and ``page.js`` are embedded in it.
"""
