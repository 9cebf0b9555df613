"""Report on one or several runs as a self-contained HTML page.

``reading`` and ``time_use`` collect the contents, ``curves`` and ``charts`` the data of the charts; ``chart``, ``bars``
and ``html`` make markup, ``sections`` and ``page`` assemble the page. ``page.css``, ``scales.js`` and ``page.js`` are
embedded in it; the script draws the charts.
"""
