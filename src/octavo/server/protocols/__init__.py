"""The protocols, one per folder: requests, answers, errors and routes.

`app` finds the folders and the modules in them that have a `router`. The files next to the folders are shared by all
protocols. A folder imports no other folder, except where one product accepts another product's requests.
"""
