"""Adapters: what a published PRM's files do not say about how it is to be read, each a record and not a class.

`jprm.load(FOLDER)` recognises the record from the folder's files; `jprm.adapters.published.PUBLISHED` holds those that
jprm knows, and a file `adapter.json` in the folder is a user's own.
"""
