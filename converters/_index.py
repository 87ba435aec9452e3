ROWS=[]
