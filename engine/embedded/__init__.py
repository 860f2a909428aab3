"""The embedded base: tiny text-to-image models that ship with the package, and what makes and measures them."""
