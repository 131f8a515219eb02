def report(r): return ""
def violations(r): return []
def fill_readme(*a): pass
