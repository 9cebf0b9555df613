"""Report on one or several runs as a self-contained HTML page.

``reading`` and ``time_use`` collect the contents, ``charts`` the data of the charts, which the page's script draws;
``sections``, ``time_section`` and ``page`` write the page. ``page.css``, ``scales.js`` and ``page.js`` are
embedded in it.
"""
