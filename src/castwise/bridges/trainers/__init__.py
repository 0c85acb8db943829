"""Integrations of castwise plans into other training libraries, one module for each library.

Each module needs its library, and is imported by its own name.
"""
