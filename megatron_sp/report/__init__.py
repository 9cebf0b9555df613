"""A run, or several, as one page of HTML that needs nothing else: ``reading`` and ``time_use`` find what there is to say, ``curves`` and
``charts`` what to draw, ``svg`` and ``html`` how, ``sections`` and ``page`` put it together, ``page.css`` and ``page.js`` go into it."""
