"""One study measured by several processes and machines, through Optuna's own storages.

Modules: `url` (where the trials are), `storage` (a storage that is patient with outages), `slots` (which trial counts),
`beats` (who is alive), `agreement` (who may take part), `shared` (the search itself), `work` (its loop).
"""
