"""One family of routes a file: each module has a `router`, and `app` finds it by its file name.

A module may name `PUBLIC_PATHS`: paths that need no API key because they hold nobody's data, such as a static page;
one that ends in `/` stands for everything below it.
"""
