"""The quarantine over HTTP, for people who label and the page that they do it on; the admin token is asked for before.

GET    /unknowns                       the page
GET    /unknowns/groups                all groups with their first items, what is ungrouped, counts, who did what
GET    /unknowns/items                 more items of a group, or of none
GET    /unknowns/items/{id}/image      the file as it was sent
GET    /unknowns/items/{id}/thumbnail  a small one
POST   /unknowns/label                 they show a new class
POST   /unknowns/known                 they show a class that the model has
POST   /unknowns/junk                  they are of no use
POST   /unknowns/clear                 as if nobody had looked at them
POST   /unknowns/move                  into a group, or out of all
POST   /unknowns/merge                 groups into the first of them
DELETE /unknowns/items/{id}            the item and its file
DELETE /unknowns/items?confirm=all     all of them
"""
