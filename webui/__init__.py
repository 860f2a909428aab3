"""The page: a view of the workspace. Everything it does, the engine does. Imports no torch."""
